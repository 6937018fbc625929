"""Public: the names of ``keepstep_megatron.prefixes``."""

from keepstep_megatron.prefixes import *  # noqa: F403
