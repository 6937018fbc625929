"""How a trainer ends for reasons of its group. The exit codes are part of the contract with launchers."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from keepstep_mesh.errors import ExitWithReason

EXIT_GROUP_FAILED = 75
"""A rank of the group died, so all of its ranks end; restart the group (EX_TEMPFAIL)."""
EXIT_EVICTED = 77
"""An operator evicted the group, or it is banned (EX_NOPERM); start it again when the ban is over."""
EXIT_OUTPUT_SECONDS = 0.5
"""What a process that ends gives its standard output and error."""


class EvictedExit(ExitWithReason):
    """The lighthouse evicted this group, or does not let it in. Exit code ``EXIT_EVICTED``."""

    exit_code = EXIT_EVICTED

    def __init__(self, reason: str) -> None:
        """Says so on standard error: a ``SystemExit`` ends its process without a word."""
        super().__init__(reason)
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            _say(f"this group was evicted: {reason}; its ranks end (exit {EXIT_EVICTED})")


class GroupFailedExit(ExitWithReason):
    """This rank cannot learn its group's decision and must not guess. Exit code ``EXIT_GROUP_FAILED``."""

    exit_code = EXIT_GROUP_FAILED


def end_process(reason: str, code: int = EXIT_GROUP_FAILED, *, stacks: bool = False) -> None:
    """Ends this process now, from any thread: its training thread may be stuck in a collective or in C++.

    Who should read its last words may be dead, or not read. ``stacks``: those of all threads are among them.
    """

    def say_last_words() -> None:
        _say(f"{reason}; ending this rank (exit {code})")
        if stacks:
            faulthandler.dump_traceback(all_threads=True)
        sys.stdout.flush()

    try:
        words = threading.Thread(target=say_last_words, name="keepstep-last-words", daemon=True)
        words.start()
        words.join(EXIT_OUTPUT_SECONDS)
    finally:
        os._exit(code)


def _say(what: str) -> None:
    print(f"keepstep: {what}", file=sys.stderr, flush=True)  # noqa: T201


class TerminationFlag:
    """SIGTERM as a wish to leave at the next step boundary. A second SIGTERM ends the process as it would have before.

    The handler that was there before is called too; in a forked child, only that. Only the main thread can install it;
    elsewhere nothing happens.
    """

    def __init__(self, wish: Callable[[str], None]) -> None:
        self._wish = wish
        self._pid = os.getpid()
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._installed = threading.current_thread() is threading.main_thread()
        self._seen = False
        if self._installed:
            self._before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        forked = os.getpid() != self._pid  # a handler that was installed after ours may call it in a child
        if (self._seen or forked) and self._before in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if not forked:
            self._seen = True
            self._wish("SIGTERM")
        if callable(self._before):
            self._before(number, frame)

    def restore(self) -> None:
        """Puts the handler back that was there before, if ours still is the one."""
        if (
            self._installed
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == self._handle
        ):
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
