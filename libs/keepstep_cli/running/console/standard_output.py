"""Standard output of a command. A failed write ends the command with a message and an exit code of its own."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep_cli.errors import Unwritable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _File(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Redirect the rest of the buffer, or Python prints an error when it exits.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise Unwritable(f"the output cannot be written: {error.strerror}") from error


def check_standard_output() -> None:
    """Make writes to standard output raise ``Unwritable``, unless it was replaced. If it is closed, use /dev/null.

    Escapes characters that the terminal or locale does not support.
    """
    stream = sys.stdout
    if stream is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    elif stream is sys.__stdout__ and isinstance(stream, io.TextIOWrapper):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_File(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering or stream.write_through,
        )
    elif isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
