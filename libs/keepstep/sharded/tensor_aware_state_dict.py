"""Public: the names of ``keepstep_megatron.tensor_aware_state_dict``."""

from keepstep_megatron.tensor_aware_state_dict import *  # noqa: F403
