"""Saves that go on in the background, as in Megatron Core: a request, and a queue that runs requests in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, Self

import msgpack

from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.stages import TIMEOUT, Ranks
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.threads.starting import ThreadPoolExecutor

log = get_logger("keepstep.sharded")


class AsyncRequest(NamedTuple):
    """The rest of a save.

    Args:
        async_fn: writes the part of this rank. It runs in a thread of this process, does not speak to other ranks, and
            reads no memory that training changes. None: this rank writes nothing.
        async_fn_args: its arguments.
        finalize_fns: called in this order on every rank, by the thread that speaks to other ranks, when ``async_fn``
            is done on this rank.
        async_fn_kwargs: its keyword arguments.
        preload_fn: copies what ``async_fn`` writes, before the request is scheduled; its result takes the place of the
            second of ``async_fn_args``. None: nothing is left to copy.
        is_frozen: whether ``add_finalize_fn`` is an error.
        call_idx: number of the request in its queue.
        timeout: time limit of the wait for the ``async_fn`` of other ranks.
        what: begins the error if one of them fails, such as ``"/checkpoints/8 was not saved"``.
        abort_fn: called in place of ``finalize_fns`` when ``async_fn`` is done, if the queue is aborted. It does not
            speak to other ranks.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0
    timeout: timedelta = TIMEOUT
    what: str = "the state was not saved"
    abort_fn: Callable[[], Any] | None = None

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function that is called after the other ``finalize_fns``. Raises ``RuntimeError`` if frozen."""
        if self.is_frozen:
            raise RuntimeError("the request is frozen: add finalize functions before it is scheduled")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do everything now. Every rank calls it.

        Raises:
            CheckpointingException: ``preload_fn``, ``async_fn`` or a function of ``finalize_fns`` failed on some rank,
                or one was lost.
        """
        self.finalize_after(lambda: self.preloaded().write())

    def preloaded(self) -> Self:
        """Call ``preload_fn``, and return the request with its result.

        Raises:
            CheckpointingException: ``async_fn_args`` has no place for it.
        """
        if self.preload_fn is None:
            return self
        first, *rest = self.async_fn_args or (None,)
        if not rest:
            raise CheckpointingException(
                f"async_fn_args has {len(self.async_fn_args)} values, but the result of preload_fn takes the place of "
                f"the second: give it at least 2"
            )
        return self._replace(async_fn_args=(first, self.preload_fn(), *rest[1:]), preload_fn=None)

    def write(self) -> None:
        """Call ``async_fn``."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)

    def finalize_after(self, written: Callable[[], None], *, alone: bool = False) -> None:
        """Call ``finalize_fns`` if ``written`` succeeds on every rank. Otherwise, raise on all of them.

        Args:
            written: writes the part of this rank, or raises the error of its writing.
            alone: this process is the only rank.
        """

        def number() -> bytes:
            written()
            packed: bytes = msgpack.packb(self.call_idx)
            return packed

        numbers = [msgpack.unpackb(one) for one in Ranks(self.what, self.timeout, alone=alone).stage(number)]
        _check_numbers(numbers)
        for fn in self.finalize_fns:
            fn()

    def freeze(self) -> Self:
        """Return the request as one that takes no more finalize functions."""
        return self._replace(is_frozen=True)


class _Call:
    """A request that runs in a thread of ``pool``."""

    def __init__(self, request: AsyncRequest, pool: ThreadPoolExecutor) -> None:
        self.number = request.call_idx
        self._request = request
        self._done: Future[None] = Future()
        try:
            ready = request.preloaded()
        except Exception as error:  # noqa: BLE001  finalize raises it, on all ranks
            self._done.set_exception(error)
            return
        self._request = ready._replace(async_fn=None, async_fn_args=(), async_fn_kwargs={})  # frees the copy when done
        self._done = pool.submit(ready.write)

    @property
    def is_done(self) -> bool:
        return self._done.done()

    def finalize(self, *, alone: bool) -> None:
        self._request.finalize_after(self._done.result, alone=alone)

    def abort(self) -> None:
        self._done.cancel()
        self._done.add_done_callback(self._aborted)

    def _aborted(self, _: Future[None]) -> None:
        log.warning("background save aborted; its checkpoint does not become complete", reason=self._request.what)
        if self._request.abort_fn is not None:
            self._request.abort_fn()


class AsyncCallsQueue:
    """Runs requests in threads, and finalizes them in the order in which they were scheduled.

    Every rank has one, and schedules the same requests.

    Args:
        persistent: run one request after another, in one thread. Default: each request has a thread of its own, and
            starts at once.
    """

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent
        self._calls: deque[_Call] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._scheduled = 0

    def schedule_async_request(self, async_request: Any) -> int:
        """Start a request, after its ``preload_fn``. Return its number, from 0.

        Args:
            async_request: an ``AsyncRequest``, which ``save(..., async_sharded_save=True)`` returns; or one of another
                library, whose fields are some of its fields.
        """
        request = async_request if isinstance(async_request, AsyncRequest) else AsyncRequest(**async_request._asdict())
        request = request.freeze()._replace(call_idx=self._scheduled)
        self._scheduled += 1
        pool = self._pool or ThreadPoolExecutor(1, f"keepstep-sharded-save-{request.call_idx}")
        self._calls.append(_Call(request, pool))
        if self.persistent:
            self._pool = pool
        else:
            pool.shutdown(wait=False)
        return request.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that are done on all ranks. Every rank calls it, such as once a step.

        Args:
            blocking: wait for all requests.
            no_dist: this process is the only rank: do not ask others.

        Returns:
            Numbers of the requests that were finalized.

        Raises:
            CheckpointingException: a request failed on some rank. It is not in the queue any more.
        """
        done: list[int] = []
        while self._calls and (blocking or self._is_done_everywhere(no_dist)):
            call = self._calls.popleft()
            call.finalize(alone=no_dist)
            done.append(call.number)
        return done

    def _is_done_everywhere(self, no_dist: bool) -> bool:
        ranks = Ranks("the state of a save in the background was not exchanged", alone=no_dist)
        mine = msgpack.packb([self._calls[0].number, self._calls[0].is_done])
        found = [msgpack.unpackb(one) for one in ranks.gather(mine)]
        _check_numbers([number for number, _ in found])
        return all(is_done for _, is_done in found)

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests that are not finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Wait for all requests, and finalize them. Every rank calls it. The queue may be used again.

        Args:
            abort: do not wait, and finalize nothing: requests that did not start yet never do, and no checkpoint
                becomes complete. This rank may call it alone.

        Raises:
            CheckpointingException: a request failed on some rank.
        """
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=False)
                self._pool = None
            while abort and self._calls:
                self._calls.pop().abort()


def _check_numbers(numbers: list[int]) -> None:
    """Raise on every rank if the ranks finalize different requests."""
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            raise CheckpointingException(
                f"rank 0 finalizes request {numbers[0]}, but rank {rank} request {number}: schedule the same requests "
                f"on all ranks, and finalize them on all ranks"
            )
