"""Public: the names of ``keepstep_megatron.core``."""

from keepstep_megatron.core import *  # noqa: F403
