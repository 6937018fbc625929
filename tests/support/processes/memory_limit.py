"""A limit of memory for a command: a cgroup of its own, of the old or the new kind. Needs root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMOVE_SECONDS = 60.0
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[tuple[str, ...]]:
    """Yield a prefix for a command, which then runs with its children in a cgroup with this limit.

    Raises:
        OSError: no cgroup can be made here.
    """
    old = (V1 / "memory.limit_in_bytes").exists()
    folder = (V1 if old else V2) / f"keepstep-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # without swap accounting
            (folder / ("memory.memsw.limit_in_bytes" if old else "memory.swap.max")).write_text(
                str(limit_bytes) if old else "0"
            )
        yield "sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"
    finally:
        deadline = time.monotonic() + REMOVE_SECONDS
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)  # killed processes leave it when the kernel has freed them
        folder.rmdir()


def why_no_limit() -> str | None:
    """Return why no limit of memory can be set here; None: one can."""
    try:
        with memory_limit(1 << 30):
            return None
    except OSError as error:
        return f"no cgroup with a limit of memory can be made here: {error}"
