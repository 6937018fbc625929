"""The end of this process at once, from any thread, with a reason where one can be written."""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import select
import sys

EXIT_OUTPUT_SECONDS = 0.5
"""Limit for the last output of a process that ends."""
_STDERR = 2


def end_now(reason: str, code: int, *, stacks: bool = False) -> None:
    """End this process. Does not return, even if its output is closed or not read, or it has no memory left.

    Args:
        reason: printed to standard error.
        code: exit code.
        stacks: print the stacks of all threads too.
    """
    try:
        line = f"keepstep: {reason}; ending this process (exit {code})"
        written: list[bool] = []
        done = _thread.allocate_lock()
        done.acquire()

        def report() -> None:
            try:
                print(line, file=sys.stderr, flush=True)  # noqa: T201
                written.append(True)
                if stacks:
                    faulthandler.dump_traceback(all_threads=True)
                sys.stdout.flush()
            except (OSError, ValueError):  # closed
                pass
            finally:
                done.release()

        with contextlib.suppress(RuntimeError, MemoryError):
            _thread.start_new_thread(report, ())  # unlike the start of a `Thread`, this waits for nothing
            done.acquire(timeout=EXIT_OUTPUT_SECONDS)
        if not written and select.select([], [_STDERR], [], 0)[1]:  # no memory for a thread, or its lock is held
            os.write(_STDERR, f"{line}\n".encode())
    finally:
        os._exit(code)
