"""Stacks and signs of life of a process whose interpreter may be locked, for another process of this machine.

On ``SIGNAL`` a process writes the stacks of its threads to a file in memory: ``faulthandler`` does it in C, within the
signal handler. Forked children inherit both. The other process finds the file in ``/proc/PID/fd``, and sees in
``/proc/PID/status`` whether the handler is there; a process without it would end. The time at which the file was
changed is the last sign of life.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 9
"""Scripts, launchers and profilers use the other ones."""
FILE_NAME = "keepstep-stacks"
MAX_BYTES = 64 * 1024
DUMP_SECONDS = 0.5
"""Limit of the wait for the stacks."""
_DUMP_POLL_SECONDS = 0.01

_lock = threading.Lock()
_file: int | None = None
_living = 0
"""The process that shows signs of life: its forked children have its file too."""


# ---- in the process itself


def accept_signal() -> None:
    """Write stacks on ``SIGNAL`` from now on, unless the script handles it. Any thread; repeated calls do nothing."""
    global _file, _living
    with _lock:
        if _file is not None or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
            return
        with contextlib.suppress(OSError, RuntimeError, AttributeError):  # no memory, or no such calls on this system
            file = os.memfd_create(FILE_NAME)
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)  # to the end, also after it was emptied
            faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
            _file, _living = file, os.getpid()
            atexit.register(_finish)


def show_life() -> None:
    """Show that the interpreter runs. The watchdog calls it in each of its turns."""
    if _file is not None and _living == os.getpid():
        with contextlib.suppress(OSError):
            os.utime(_file)


def _finish() -> None:
    """Show that no more signs of life will come: an interpreter that ends stops its threads."""
    global _living
    if _file is not None and _living == os.getpid():
        _living = 0
        with contextlib.suppress(OSError):
            os.utime(_file, (0, 0))


# ---- in another process


def sign_of_life(pid: int) -> int:
    """Return a number that changes while the interpreter of this process runs; 0: it is stopped, or shows none."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        if _status(pid)["State"].strip()[:1] in ("T", "t") or (file := file_of(pid)) is None:
            return 0
        return file.stat().st_mtime_ns
    return 0


def file_of(pid: int) -> Path | None:
    """Return the file into which this process writes its stacks; None: it writes none, or is not ours to look into."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        if not int(_status(pid)["SigCgt"], 16) >> (SIGNAL - 1) & 1:
            return None
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(one).startswith(f"/memfd:{FILE_NAME}"):  # noqa: PTH115  no file of the file system
                    return one
    return None


def _status(pid: int) -> dict[str, str]:
    return dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def dumped_stacks(pid: int) -> str:
    """Return the stacks of all threads of this process, as ``faulthandler`` writes them; empty: it writes none."""
    if (file := file_of(pid)) is None:
        return ""
    with contextlib.suppress(OSError), file.open("r+b") as opened:
        before = opened.seek(0, os.SEEK_END)
        if before > MAX_BYTES:  # it is memory
            before = opened.truncate(0)
        os.kill(pid, SIGNAL)
        text, until = b"", time.monotonic() + DUMP_SECONDS
        while time.monotonic() < until:
            time.sleep(_DUMP_POLL_SECONDS)  # a signal handler cannot wake the reader
            opened.seek(before)
            if (longer := opened.read(MAX_BYTES)) == text and text:
                break
            text = longer
        return text.decode(errors="replace")
    return ""
