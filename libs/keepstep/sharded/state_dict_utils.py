"""Public: the first steps of a save and of a load, under the names of Megatron Core."""

from keepstep_megatron.serialization import save_preprocess
from keepstep_megatron.state_parts import load_preprocess
from keepstep_megatron.state_parts import without_empty_ranges as filter_out_empty_flatten_tensor

__all__ = ["filter_out_empty_flatten_tensor", "load_preprocess", "save_preprocess"]
