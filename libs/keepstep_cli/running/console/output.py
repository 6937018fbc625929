"""Print the output of ranks, line by line, each line with the name of its rank."""

from __future__ import annotations

import asyncio
import os
import select
import zlib
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
LONGEST_LINE = 16 * 1024
"""Maximum bytes of a line; longer ones are split."""
IDLE_OUTPUT_SECONDS = 0.5
"""Seconds without output after which a line without a line end is printed."""

LineReceiver = Callable[[str], None]


async def read_lines(stream: asyncio.StreamReader, receive: LineReceiver) -> None:
    """Pass each line on as text without its end, until the stream ends. A carriage return ends a line too."""
    pending = b""
    while True:
        try:
            async with asyncio.timeout(IDLE_OUTPUT_SECONDS if pending else None):
                chunk = await stream.read(LONGEST_LINE)
        except TimeoutError:
            receive(pending.decode(errors="replace"))
            pending = b""
            continue
        if not chunk:
            break
        *lines, pending = (pending + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            receive(line.decode(errors="replace"))
        if len(pending) >= LONGEST_LINE:
            receive(pending.decode(errors="replace"))
            pending = b""
    if pending:
        receive(pending.decode(errors="replace"))


class PrefixedOutput:
    """Write lines of many ranks to one stream as ``[r0/1] line``.

    On a terminal the names are colored by group, unless the variable NO_COLOR is set. ``timestamps``: begin each line
    with the time.
    """

    def __init__(self, stream: TextIO, *, timestamps: bool = False) -> None:
        self._stream = stream
        self._colour = stream.isatty() and not os.environ.get("NO_COLOR")
        self._timestamps = timestamps

    def write(self, group: str, rank: int | None, line: str) -> None:
        """Write one line; ``rank`` None: about the group. Raises BrokenPipeError if the reader closed the stream."""
        prefix = f"[{group}]" if rank is None else f"[{group}/{rank}]"
        if self._colour:
            prefix = f"\x1b[{COLOURS[zlib.crc32(group.encode()) % len(COLOURS)]}m{prefix}\x1b[0m"
        if self._timestamps:
            prefix = f"{datetime.now().astimezone().strftime('%H:%M:%S.%f')[:-3]} {prefix}"
        try:
            self._write(f"{prefix} {line}\n".encode(self._stream.encoding, "replace"))
        except BrokenPipeError:
            # Redirect the rest of the buffer, or Python prints an error when it exits.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            raise

    def _write(self, data: bytes) -> None:
        """Write to the descriptor. Python's buffered streams lose 8 KiB when a signal, here of a dead rank,
        interrupts a write to a full pipe (seen with 3.11).
        """
        descriptor = self._stream.fileno()
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # the parent process shares the descriptor and made it non-blocking
                select.select([], [descriptor], [])
