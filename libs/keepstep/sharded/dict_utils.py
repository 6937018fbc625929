"""Public: the names of ``keepstep_megatron.dict_utils``."""

from keepstep_megatron.dict_utils import *  # noqa: F403
