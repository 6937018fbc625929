"""Public: ``keepstep_megatron``, the names of Megatron Core's ``dist_checkpointing``, in modules of the same names."""

import sys

from keepstep.sharded import (  # noqa: F401
    core,
    dict_utils,
    mapping,
    optimizer,
    prefixes,
    serialization,
    strategies,
    tensor_aware_state_dict,
    validation,
)
from keepstep_megatron import *  # noqa: F403
from keepstep_megatron import __all__ as __all__
from keepstep_megatron.strategies import fully_parallel

utils = prefixes
sys.modules |= {  # modules of Megatron Core whose names are in others here
    f"{__name__}.utils": prefixes,
    f"{__name__}.strategies.base": strategies,
    f"{__name__}.strategies.fully_parallel": fully_parallel,
}
