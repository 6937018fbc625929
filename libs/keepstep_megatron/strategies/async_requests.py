"""Saves that go on in the background, as in Megatron Core: a request, and a queue that runs requests in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, Self

from keepstep_megatron.stages import TIMEOUT, Ranks
from keepstep_mesh.threads.starting import Thread


class AsyncRequest(NamedTuple):
    """The rest of a save.

    Args:
        async_fn: writes the part of this rank. It may run in any thread, and does not speak to other ranks. None:
            this rank writes nothing.
        async_fn_args: its arguments.
        finalize_fns: called in this order on every rank, by the thread that speaks to other ranks, when ``async_fn``
            is done on this rank.
        async_fn_kwargs: its keyword arguments.
        is_frozen: whether ``add_finalize_fn`` is an error.
        timeout: time limit of the wait for the ``async_fn`` of other ranks.
        what: begins the error if one of them fails, such as ``"/checkpoints/8 was not saved"``.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] = {}
    is_frozen: bool = False
    timeout: timedelta = TIMEOUT
    what: str = "the state was not saved"

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function that is called after the other ``finalize_fns``. Raises ``RuntimeError`` if frozen."""
        if self.is_frozen:
            raise RuntimeError("the request is frozen: add finalize functions before it is scheduled")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do everything now. Every rank calls it.

        Raises:
            CheckpointingException: ``async_fn`` or a function of ``finalize_fns`` failed on some rank, or one was lost.
        """
        self.finalize_after(self.write)

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
        Ranks(self.what, self.timeout, alone=alone).stage(written)
        for fn in self.finalize_fns:
            fn()

    def freeze(self) -> Self:
        """Return the request as one that takes no more finalize functions."""
        return self._replace(is_frozen=True)


class _Call:
    """A request that runs in a thread."""

    def __init__(self, number: int, request: AsyncRequest) -> None:
        self.number = number
        self._request = request.freeze()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"keepstep-sharded-save-{number}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._request.write()
        except BaseException as error:  # noqa: BLE001  finalize raises it
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def finalize(self, *, alone: bool) -> None:
        self._thread.join()
        self._request.finalize_after(self._raise, alone=alone)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class AsyncCallsQueue:
    """Runs requests in threads, and finalizes them in the order in which they were scheduled.

    Every rank has one, and schedules the same requests.
    """

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()
        self._scheduled = 0

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request. Return its number, from 1.

        Args:
            async_request: returned by ``save(..., async_sharded_save=True)``.
        """
        self._scheduled += 1
        self._calls.append(_Call(self._scheduled, async_request))
        return self._scheduled

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
        return all(one == b"1" for one in ranks.gather(b"1" if self._calls[0].is_done else b"0"))

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests that are not finalized."""
        return len(self._calls)

    def close(self) -> None:
        """Wait for all requests, and finalize them. Every rank calls it."""
        self.maybe_finalize_async_calls(blocking=True)
