"""Exits of a trainer process for reasons of its group. Launchers rely on the exit codes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import ClassVar, ParamSpec, TypeVar

from keepstep.runtime.unread_output import tolerate_broken_pipes
from keepstep_mesh.errors import ExitWithReason
from keepstep_mesh.exit_codes import (
    EXIT_COLLECTIVES_DIFFER,
    EXIT_DIVERGED,
    EXIT_EVICTED,
    EXIT_GROUP_FAILED,
    EXIT_JOB_CLOSED,
    EXIT_MISMATCH,
    EXIT_PREFLIGHT,
    EXIT_START_REFUSED,
    EXIT_STATE_MISMATCH,
    EXIT_WATCHDOG,
)
from keepstep_mesh.threads.ending import end_now

P = ParamSpec("P")
T = TypeVar("T")

SIGTERM_REASON = "SIGTERM"
"""The reason of a leave after that signal."""


class PrintedExit(ExitWithReason):
    """An exit that prints its reason to standard error, because Python prints nothing for a ``SystemExit``."""

    happened: ClassVar[str]
    """Beginning of the printed sentence: the event that ends the group."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        with contextlib.suppress(OSError, ValueError):  # standard error is closed
            _print(f"{self.happened}: {reason}; its ranks end (exit {self.exit_code})")


class EvictedExit(PrintedExit):
    """The lighthouse evicted this group, or refuses it. Exit code ``EXIT_EVICTED``."""

    exit_code = EXIT_EVICTED
    happened = "this group was evicted"


class StartRefusedExit(PrintedExit):
    """The job has finished, or may not go back to the step of this group. Exit code ``EXIT_START_REFUSED``."""

    exit_code = EXIT_START_REFUSED
    happened = "this group may not start its job again"


class JobClosedExit(PrintedExit):
    """The other groups have finished, and this one does not have their final state. Exit code ``EXIT_JOB_CLOSED``."""

    exit_code = EXIT_JOB_CLOSED
    happened = "this group came too late"


class MismatchExit(PrintedExit):
    """The model or settings of this group differ from those of the job. Exit code ``EXIT_MISMATCH``."""

    exit_code = EXIT_MISMATCH
    happened = "this group does not fit its job"


class StateMismatchExit(PrintedExit):
    """This group cannot load the state of the job. Exit code ``EXIT_STATE_MISMATCH``."""

    exit_code = EXIT_STATE_MISMATCH
    happened = "this group cannot load the state of the job"


class CollectivesExit(PrintedExit):
    """This group began another number of collectives than others. Exit code ``EXIT_COLLECTIVES_DIFFER``."""

    exit_code = EXIT_COLLECTIVES_DIFFER
    happened = "this group cannot train with the others"


class DivergedExit(PrintedExit):
    """The weights of this group differ from those of other groups. Exit code ``EXIT_DIVERGED``."""

    exit_code = EXIT_DIVERGED
    happened = "the weights of the groups differ"


class PreflightExit(PrintedExit):
    """This machine failed a check before its group joined. Exit code ``EXIT_PREFLIGHT``."""

    exit_code = EXIT_PREFLIGHT
    happened = "this machine may not join the job"


class GroupFailedExit(ExitWithReason):
    """The decision of this rank's group is unknown, so the rank must end. Exit code ``EXIT_GROUP_FAILED``."""

    exit_code = EXIT_GROUP_FAILED


def leave_cause(reason: str) -> str:
    """Return the ``Leave.cause`` of a group that was asked to leave for ``reason``."""
    return "stopped" if reason == SIGTERM_REASON else "drained"


def handled_error() -> int:
    """Return which error is being handled now, for ``script_error``; 0: none."""
    error = sys.exc_info()[1]
    return 0 if error is None else id(error)


def script_error(handled: int, *, at_exit: bool) -> str:
    """Return the error with which the script ends now, in one line; empty: it ends normally.

    Args:
        handled: ``handled_error()`` of the last step: a script that trains in an ``except`` block has no error.
        at_exit: the process ends. Then the error may have ended the script before. In a notebook or an interactive
            Python it has not: an error there ends a cell.
    """
    error = sys.exc_info()[1]
    if error is not None and id(error) == handled:
        error = None
    elif error is None and at_exit and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, StopIteration | GeneratorExit):
        return ""
    if isinstance(error, SystemExit):
        return "" if not error.code else f"exit code {error.code}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def end_process(reason: str, code: int = EXIT_GROUP_FAILED, *, stacks: bool = False) -> None:
    """End this process now. From any thread, because the training thread may be stuck in a collective.

    The process ends even if its standard output and error are closed or not read.

    Args:
        reason: printed to standard error.
        code: exit code.
        stacks: print the stacks of all threads too.
    """
    end_now(reason, code, stacks=stacks)


def must_succeed(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """End the process with ``EXIT_WATCHDOG`` if the decorated function raises an exception, such as MemoryError.

    For functions whose effect other threads or groups wait for: without it, they would wait until their deadline.

    Args:
        what: the beginning of the reason.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                end_process(f"{what} failed: {error!r}", EXIT_WATCHDOG, stacks=True)
                raise

        return run

    return decorate


def _print(text: str) -> None:
    print(f"keepstep: {text}", file=sys.stderr, flush=True)  # noqa: T201


class TerminationFlag:
    """Handles SIGTERM as a request to leave at the next step boundary.

    The previous handler is called too; in a forked child it alone is called. A second SIGTERM does what it did before
    the handler was installed. Only the main thread can install a handler; in other threads this does nothing.

    Args:
        on_sigterm: called with the reason, ``SIGTERM``.
    """

    def __init__(self, on_sigterm: Callable[[str], None]) -> None:
        self._on_sigterm = on_sigterm
        self._pid = os.getpid()
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._installed = threading.current_thread() is threading.main_thread()
        self._seen = False
        if self._installed:
            self._before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        forked = os.getpid() != self._pid  # a later handler may call this one in a child
        if (self._seen or forked) and self._before in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if not forked:
            self._seen = True
            tolerate_broken_pipes()  # the signal may have ended the reader of a shell pipe too
            self._on_sigterm(SIGTERM_REASON)
        if callable(self._before):
            self._before(number, frame)

    def restore(self) -> None:
        """Restore the previous handler, if this one is still installed."""
        if (
            self._installed
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == self._handle
        ):
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
