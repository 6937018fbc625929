"""The work of a call, counted in bytecode instructions: the same on an idle and on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(work: Callable[[], object]) -> int:
    """Return how many instructions of Python ``work`` runs. Loops inside functions written in C are not counted."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 has no such events unless a frame asked for them before
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
