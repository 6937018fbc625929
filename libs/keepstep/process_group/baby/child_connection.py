"""The connection of a process group with its child process: orders, results, deadlines, and the end."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store, Work

from keepstep.process_group.baby.baby_work import BabyWork
from keepstep.process_group.baby.channel import ChannelError
from keepstep.process_group.baby.children import ChildProcess
from keepstep.process_group.baby.operations import PackedCall, timeout_of
from keepstep.process_group.baby.remote_store import call_store
from keepstep.process_group.baby.shared_memory import Segment, SegmentPool, new_segment
from keepstep.process_group.group_errors import ProcessGroupError, ProcessGroupTimeoutError
from keepstep.rendezvous.interruptible_store import UNKNOWN_VERSION
from keepstep.runtime.exits import must_succeed
from keepstep_mesh.net.fork_safety import fork_error, tell_children
from keepstep_mesh.threads.starting import Thread

CHECK_SECONDS = 1.0
"""Interval at which the reader checks the deadlines of operations without a waiting thread."""
CHILD_ENDED = "the child process of the process group has ended"
CHILD_FAILED = "the child process of the process group failed"

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (ProcessGroupError, ProcessGroupTimeoutError, TimeoutError, RuntimeError, TypeError, ValueError)
}


class Connection:
    """One child process, from its fork to its end.

    The first failure kills the child: every operation in flight then fails.

    Args:
        child: the process, which this object ends.
        store: store that the child's backend uses through this process.
        timeout: limit of the rendezvous, and of each operation without its own limit.
    """

    def __init__(self, child: ChildProcess, store: Store, timeout: timedelta) -> None:
        self.error: Exception | None = None
        self.pid = child.pid
        self._child = child
        self._store = store
        self._timeout = timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._works: dict[int, BabyWork] = {}
        self._pool = SegmentPool()
        self._closed = False
        self._store_calls: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = Thread(target=self._read, name="keepstep-baby-reader", daemon=True)
        self._store_server = Thread(target=self._serve_store, name="keepstep-baby-store", daemon=True)
        tell_children(self)
        self._reader.start()
        self._store_server.start()

    def forked(self) -> None:
        """Make the connection unusable in a forked child, which has no reader."""
        self._lock = threading.Lock()
        self._closed = True
        self.error = fork_error("the process group", self._pid)

    def configure(self, **order: Any) -> None:
        """Connect the child with its peers.

        Raises:
            TimeoutError: not all members connected in time.
            ProcessGroupError: the members could not connect, or the child ended.
        """
        version = getattr(self._store, "version", UNKNOWN_VERSION)
        order |= {"do": "configure", "timeout": self._timeout.total_seconds(), "store_version": version}
        self._begin(BabyWork(self.fail, "configure", None, [], self._timeout), order).wait()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._send({"do": "set_timeout", "timeout": timeout.total_seconds()})

    def run(self, operation: str, args: tuple[Any, ...]) -> Work:
        """Start a collective in the child.

        Raises:
            ProcessGroupError: the child has failed.
            TypeError: an argument cannot go to a child process.
        """
        if self.error is not None:
            raise ProcessGroupError(
                f"cannot run {operation}: the process group failed and must be configured again: {self.error}"
            ) from self.error
        call = PackedCall(operation, args, self._take_segment)
        work = BabyWork(self.fail, operation, call, args[0], timeout_of(args) or self._timeout)
        return self._begin(work, {"do": "run", **call.message})

    def in_flight(self) -> int:
        with self._lock:
            return len(self._works)

    @must_succeed("the abort of a process group")
    def fail(self, error: Exception) -> None:
        """Store the first error, kill the child, and fail the operations in flight. Does not wait. From any thread."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            works, self._works = list(self._works.values()), {}
        self._child.kill()
        abort = getattr(self._store, "abort", None)
        if abort is not None:
            abort(str(error))
        for work in works:
            work.end(error)

    def close(self) -> None:
        """Free all resources, after ``fail``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._child.channel.interrupt()
        self._store_calls.put(None)
        for thread in (self._reader, self._store_server):
            if thread is not threading.current_thread():
                thread.join(5.0)
        self._child.close()

    def _take_segment(self, size: int) -> Segment:
        with self._lock:
            segment = self._pool.take(size)
        if segment is None:
            segment, descriptor = new_segment(size)
            try:
                self._send({"do": "map", "segment": segment.id, "size": segment.size}, [descriptor])
            finally:
                os.close(descriptor)
        return segment

    def _begin(self, work: BabyWork, order: dict[str, Any]) -> BabyWork:
        with self._lock:
            if self.error is not None:
                raise work.error_of(self.error)
            number = next(self._ids)
            self._works[number] = work
        self._send(order | {"id": number})
        return work

    def _send(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        try:
            self._child.channel.send(order, descriptors)
        except OSError as error:
            self.fail(ProcessGroupError(CHILD_ENDED))
            raise ProcessGroupError(str(self.error)) from error
        except ChannelError as error:
            self.fail(ProcessGroupError(f"{CHILD_FAILED}: {error}"))
            raise ProcessGroupError(str(self.error)) from error

    def _read(self) -> None:
        try:
            self._receive_answers()
        except Exception as error:  # noqa: BLE001  such as MemoryError
            self.fail(ProcessGroupError(f"the answers of the child process cannot be read: {error!r}"))

    def _receive_answers(self) -> None:
        while self.error is None:
            try:
                received = self._child.channel.receive(self._next_deadline())
            except TimeoutError:
                self._fail_overdue()
                continue
            except (ChannelError, OSError) as error:
                self.fail(ProcessGroupError(f"{CHILD_FAILED}: {error}"))
                return
            if received is None:
                self.fail(ProcessGroupError(CHILD_ENDED))
                return
            try:
                self._handle(received[0])
            except (AttributeError, ChannelError, KeyError, TypeError) as error:
                self.fail(ProcessGroupError(f"{CHILD_FAILED}: invalid message: {error!r}"))

    def _handle(self, message: dict[str, Any]) -> None:
        if message["do"] == "store":
            if not self._store_calls.empty():
                raise ChannelError("the child called the store again before the answer of its last call")
            self._store_calls.put(message)
            return
        kind = message["kind"]
        error = None if kind is None else _ERRORS.get(kind, ProcessGroupError)(message["error"])
        dropped: list[Segment] = []
        with self._lock:
            work = self._works.get(message["id"])
            if work is not None:
                if error is None:
                    work.copy_results()  # under the lock: never after `fail`
                if work.segment is not None:
                    dropped = self._pool.give_back(work.segment)
                del self._works[message["id"]]  # not before: if the copy fails, `fail` ends the operation
        if work is None:
            if self.error is None:
                self.fail(ProcessGroupError(f"{CHILD_FAILED}: it answered operation {message['id']}, not in flight"))
            return
        for segment in dropped:
            self._send({"do": "unmap", "segment": segment.id})
        if error is not None and message["failed"]:
            self.fail(error)
        work.end(error)

    def _next_deadline(self) -> float:
        with self._lock:
            deadlines = [work.deadline for work in self._works.values()]
        return min([time.monotonic() + CHECK_SECONDS, *deadlines])

    def _fail_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            overdue = [work for work in self._works.values() if work.deadline <= now]
        if overdue:
            self.fail(overdue[0].timeout_error())

    def _serve_store(self) -> None:
        """Run the child's calls of the store in a thread of their own: they block."""
        try:
            while (call := self._store_calls.get()) is not None:
                answer = call_store(self._store, str(call["method"]), call["args"])
                self._send({"do": "answer", **answer})
        except Exception as error:  # noqa: BLE001  such as MemoryError
            self.fail(ProcessGroupError(f"a call of the child process to the store failed: {error!r}"))
