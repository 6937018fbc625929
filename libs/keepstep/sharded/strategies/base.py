"""Public: base classes and registration of strategies, under the names of Megatron Core."""

from keepstep.sharded.refused import refusing
from keepstep_megatron.strategies import *  # noqa: F403

__getattr__ = refusing(
    __name__,
    {
        "async_calls": "make an AsyncCallsQueue",
        "default_strategies": "get_default_strategy and register_default_strategy read and change the defaults",
    },
)
