"""Public: ``keepstep_megatron``, the names of Megatron Core's ``dist_checkpointing``, in modules of the same names."""

from keepstep.sharded import (  # noqa: F401
    core,
    dict_utils,
    exchange_utils,
    mapping,
    optimizer,
    prefixes,
    serialization,
    state_dict_utils,
    strategies,
    tensor_aware_state_dict,
    utils,
    validation,
)
from keepstep_megatron import *  # noqa: F403
from keepstep_megatron import __all__ as __all__
