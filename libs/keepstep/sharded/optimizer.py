"""Public: the names of ``keepstep_megatron.optimizer``."""

from keepstep_megatron.optimizer import *  # noqa: F403

KEEP_VARS_HINT = "make the sharded state dict from model.state_dict(keep_vars=True)"
