"""Public: saves in the background, under the names of Megatron Core."""

from keepstep.sharded.refused import refusing
from keepstep_megatron.strategies.async_requests import AsyncCallsQueue, AsyncRequest

__all__ = ["AsyncCallsQueue", "AsyncRequest"]

_QUEUE = "AsyncCallsQueue runs requests in threads"

__getattr__ = refusing(
    __name__,
    dict.fromkeys(("AsyncCaller", "PersistentAsyncCaller", "TemporalAsyncCaller", "_ActiveAsyncRequest"), _QUEUE)
    | {"_disable_gc": "its saves need no pause of the garbage collector"},
)
