"""Progress of a long command, on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_SECONDS = 10.0

Progress = Callable[[str, int, int], None]
"""Receives what is done (``reading``), the bytes done, and the bytes in all (0: not known). Any thread may call it."""


@contextmanager
def showing_progress() -> Iterator[Progress]:
    """Yield a function that shows progress until the block ends."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn()
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)


def _lines() -> Progress:
    from keepstep_mesh.text import bytes_text

    shown = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= LINE_SECONDS:
            shown = time.monotonic()
            text = f" {bytes_text(done)}" if done or total else ""
            print(f"{what}{text}{f' of {bytes_text(total)}' if total else ''}", file=sys.stderr, flush=True)

    return show
