"""Standard output of a command: what it does not take ends the command with a sentence and an exit code of its own."""

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
            # What is still buffered must go somewhere, or Python complains when it exits.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise Unwritable(f"the output cannot be written: {error.strerror}") from error


def check_standard_output() -> None:
    """From now on its writes raise ``Unwritable``, unless something else has taken its place. Closed, it is /dev/null.

    Names may have what a terminal or a locale has not: that is escaped.
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
