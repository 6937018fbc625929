"""End this process if a block of code takes too long, because a thread that is stuck cannot end it.

One thread watches all blocks. It starts with the first one, which every process enters when it starts a thread, and
ends with the process.

A limit counts turns of that thread, not time: a process that was stopped, or whose interpreter was locked, gets the
rest of its limit.
"""

from __future__ import annotations

import _thread
import math
import os
import time

from keepstep_mesh.exit_codes import EXIT_WATCHDOG
from keepstep_mesh.threads.dumped_stacks import show_life
from keepstep_mesh.threads.ending import end_now

WATCHDOG_TURN_SECONDS = 0.5
WATCHDOG_START_SECONDS = 10.0
"""Limit for the start of the thread."""
_START_POLL_SECONDS = 0.001

_watched: dict[watched, None] = {}
"""Open blocks. Their end takes no memory."""
_is_watching = False
_only_one = _thread.allocate_lock()


class watched:  # noqa: N801  a context manager
    """End the process with ``EXIT_WATCHDOG``, and the stacks of its threads, if the block takes too long.

    Args:
        what: the beginning of the reason.
        seconds: limit of the block; the end comes up to two turns later.
    """

    __slots__ = ("_seconds", "_turns_left", "_what")

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._seconds = seconds
        self._turns_left = math.ceil(seconds / WATCHDOG_TURN_SECONDS)

    def __enter__(self) -> None:
        if not _is_watching:
            _start_watching()
        _watched[self] = None

    def __exit__(self, *_: object) -> None:
        _watched.pop(self, None)  # None: forked within the block

    def turn(self) -> None:
        """Count a turn, and end the process after the last one."""
        self._turns_left -= 1
        if self._turns_left < 0:
            end_now(f"{self._what} has been stuck for {self._seconds:g} s", EXIT_WATCHDOG, stacks=True)


def _start_watching() -> None:
    """Start the thread, and end the process if it does not run in time: it may get no memory for its first call."""
    _thread.start_new_thread(_watch, ())  # not a `Thread`: its start could hang, as what it is to watch
    for _ in range(math.ceil(WATCHDOG_START_SECONDS / _START_POLL_SECONDS)):  # counts no time in which it was stopped
        if _is_watching:
            return
        time.sleep(_START_POLL_SECONDS)  # a thread that got no memory signals nothing
    end_now("the watchdog did not start (is memory missing?)", EXIT_WATCHDOG)


def _watch() -> None:
    global _is_watching
    if not _only_one.acquire(blocking=False):
        return
    _is_watching = True
    while True:
        time.sleep(WATCHDOG_TURN_SECONDS)  # a turn; the stuck threads that it looks for wake nothing
        try:
            show_life()
            for one in tuple(_watched):
                one.turn()
        except (MemoryError, RuntimeError):  # the next turn tries again; RuntimeError: a block began or ended
            continue


def _forked() -> None:
    """Begin again in a child, which does not have the thread."""
    global _is_watching, _only_one
    _is_watching, _only_one = False, _thread.allocate_lock()
    _watched.clear()


os.register_at_fork(after_in_child=_forked)
