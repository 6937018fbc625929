"""Operations that begin several collectives, one after another, in the same order in all ranks.

A collective of one rank meets the collective that its peers begin as the same number in their sequence. An operation of
several collectives, such as a quantized all-reduce, begins the later ones when the earlier ones have arrived: in a
thread, so that its caller goes on. Until it has ended, no other operation of the group begins.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
from torch.distributed.distributed_c10d import Work

from keepstep.process_group.group_errors import timed_out
from keepstep.process_group.works import PendingWork, writing
from keepstep.runtime.exits import must_succeed
from keepstep_mesh.net.fork_safety import tell_children
from keepstep_mesh.threads.starting import Thread

Begin = Callable[..., Work]
"""Begins a collective: the method of torch's backends by name, and its arguments."""
Task = Callable[[Begin], None]
"""Begins collectives and waits for them."""


class Sequence:
    """The operations of several collectives of one process group, in their order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: collections.deque[TaskWork] = collections.deque()
        self._thread: Thread | None = None
        tell_children(self)

    def forked(self) -> None:
        """Drop the operations in a forked child, which does not have their thread."""
        self._changed = threading.Condition()
        self._tasks.clear()
        self._thread = None

    def add(self, task: Task, tensors: list[torch.Tensor], begin: Begin, abort: Callable[[str], None]) -> TaskWork:
        """Run a task in a thread, after the tasks before it.

        Args:
            task: called with ``begin``.
            tensors: value of the future.
            begin: begins a collective of the group.
            abort: aborts the group, with the reason.
        """
        work = TaskWork(partial(task, begin), tensors, abort)
        with self._changed:
            if self._thread is None:
                thread = Thread(target=self._run, name="keepstep-sequence", daemon=True)
                thread.start()  # it waits for the lock; if it cannot start, nothing waits for it
                self._thread = thread
            self._tasks.append(work)
        return work

    def wait_turn(self) -> None:
        """Wait until all tasks have ended. The timeouts of their collectives limit the wait."""
        if self._tasks and threading.current_thread() is not self._thread:
            with self._changed:
                self._changed.wait_for(lambda: not self._tasks)

    @must_succeed("the thread of operations of several collectives")
    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._thread = None
                    return
                work = self._tasks[0]
            work.run()
            with self._changed:
                self._tasks.popleft()
                self._changed.notify_all()


class TaskWork(PendingWork):
    """A task in flight. The timeouts of its collectives limit a wait without a limit of its own."""

    def __init__(self, task: Callable[[], None], tensors: list[torch.Tensor], abort: Callable[[str], None]) -> None:
        super().__init__(tensors)
        self._task: Callable[[], None] | None = task
        self._abort = abort

    def run(self) -> None:
        """Run the task. Does not raise."""
        task, self._task = self._task, None
        failed: Exception | None = None
        try:
            if task is not None:
                with writing(self._tensors), torch.no_grad():
                    task()
        except Exception as error:  # noqa: BLE001  raised by `wait`
            failed = error.with_traceback(None)  # its frames hold buffers
            self._abort(f"{type(error).__name__}: {error}")  # peers wait for the rest of the operation
        del task
        self._end(failed)

    def _seconds(self, timeout: timedelta) -> float | None:
        return timeout.total_seconds() if timeout > timedelta(0) else None

    def _time_out(self, timeout: timedelta) -> None:
        error = timed_out("the operation", timeout)
        self._abort(str(error))
        self._over.wait()
        raise error
