"""Standard output whose reader has gone: discard further output, so that the process can end in order."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _MayBreak(io.FileIO):
    """A descriptor that discards output once its pipe is broken."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _discard(self.fileno())
            return memoryview(data).nbytes


def tolerate_broken_pipes() -> None:
    """Make prints to a closed pipe do nothing from now on. A stream that the script replaced stays as it is.

    Safe in a signal handler: the previous streams are flushed only at the end of the process.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            raw = io.BufferedWriter(_MayBreak(stream.fileno(), "w", closefd=False))
            line_buffering = stream.line_buffering or stream.write_through
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=line_buffering))
            atexit.register(_flush, stream)


def _flush(stream: io.TextIOWrapper) -> None:
    """Flush the stream, or else Python ends with exit code 120."""
    try:
        stream.flush()
    except BrokenPipeError:
        _discard(stream.fileno())
    except ValueError:  # it was closed
        pass


def _discard(descriptor: int) -> None:
    """Discard the output of all streams of this descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
