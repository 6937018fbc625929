"""Public: the names of ``keepstep_megatron.strategies``."""

from keepstep_megatron.strategies import *  # noqa: F403
