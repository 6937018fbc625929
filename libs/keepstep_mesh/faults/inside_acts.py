"""Faults that any process of Python can bring on itself: a locked interpreter, and a clock that is wrong.

Each is a context manager. It begins the fault, and gives the seconds for which the fault goes on by itself; its end
undoes the fault.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

CLOCK_JUMP_SECONDS = 3600.0
_clock = threading.Lock()

Act = Callable[[float], AbstractContextManager[float]]
"""Takes the seconds of the fault."""


@contextmanager
def locked_interpreter(seconds: float) -> Iterator[float]:
    """Hold the GIL, as an extension does that computes without releasing it: no other thread runs Python code."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))  # a PyDLL, unlike a CDLL, keeps the GIL
    yield 0.0


@contextmanager
def clock_ahead(seconds: float) -> Iterator[float]:
    """Let ``time.time`` and ``time.time_ns`` of this process be an hour ahead, and go back at the end."""
    with _clock:
        right, right_ns = time.time, time.time_ns
        time.time = lambda: right() + CLOCK_JUMP_SECONDS
        time.time_ns = lambda: right_ns() + int(CLOCK_JUMP_SECONDS * 1e9)
        try:
            yield seconds
        finally:
            time.time, time.time_ns = right, right_ns


ACTS: Mapping[str, Act] = {"gil": locked_interpreter, "clock": clock_ahead}
"""By kind of fault."""
