"""The one daemon thread of a trainer that runs an asyncio loop: session, group server, transfers.

The training thread stays synchronous. It hands coroutines over and waits, with a deadline, only where it must.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from keepstep_mesh.net.event_loop import new_event_loop
from keepstep_mesh.net.fork_safety import fork_error

T = TypeVar("T")

CALL_MARGIN_SECONDS = 15.0
"""Seconds that a caller waits beyond a deadline that the mesh thread keeps."""


class LoopThread:
    """An event loop in a thread of its own.

    Args:
        name: name of the thread, for people who look at stacks.
    """

    def __init__(self, name: str = "keepstep-mesh") -> None:
        self.loop = new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts ``coroutine`` on the loop. Any thread."""
        if self.loop.is_closed() or not self._thread.is_alive():
            coroutine.close()
            if os.getpid() != self._pid:
                raise fork_error(f"the thread {self._thread.name!r}", self._pid)
            raise RuntimeError("keepstep's mesh thread has ended: the Manager was shut down")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Runs ``coroutine`` on the loop and waits up to ``timeout`` seconds; then cancels it: TimeoutError."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("the mesh thread cannot wait for itself")
        future = self.spawn(coroutine)
        try:
            return future.result(timeout)
        except BaseException as error:
            if future.cancel() and isinstance(error, TimeoutError):
                raise TimeoutError(f"keepstep's mesh thread was not done within {timeout:g} s") from None
            raise

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the loop, cancels what still runs, joins the thread. Twice is fine."""
        if self._thread.is_alive():
            try:
                self.loop.call_soon_threadsafe(self.loop.stop)
            except RuntimeError:  # closed between the two lines
                return
            self._thread.join(timeout)
