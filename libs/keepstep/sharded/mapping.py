"""Public: the names of ``keepstep_megatron.mapping``."""

from keepstep_megatron.mapping import *  # noqa: F403
