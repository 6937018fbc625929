"""Public: the names of ``keepstep_megatron.strategies``; ``strategies.base`` is the same module."""

import sys

from keepstep.sharded.refused import refusing
from keepstep_megatron.strategies import *  # noqa: F403

__getattr__ = refusing(
    f"{__name__}.base",
    {
        "async_calls": "make an AsyncCallsQueue",
        "default_strategies": "get_default_strategy and register_default_strategy read and change the defaults",
    },
)
base = sys.modules[f"{__name__}.base"] = sys.modules[__name__]
