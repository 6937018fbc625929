"""Public: the names of ``keepstep_megatron.optimizer``."""

from keepstep_megatron.optimizer import *  # noqa: F403
