"""Public: the names of ``keepstep_megatron.serialization``."""

from keepstep_megatron.serialization import *  # noqa: F403
