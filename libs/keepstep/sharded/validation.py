"""Public: the names of ``keepstep_megatron.validation``."""

from keepstep_megatron.validation import *  # noqa: F403
