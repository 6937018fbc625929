"""Let a process get no more memory than it has: its next allocation of new memory fails."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence

from keepstep_chaos.observing.process_table import GONE, PAGE_BYTES, PROC


@contextlib.contextmanager
def memory_limited(pids: Sequence[int]) -> Iterator[None]:
    """Set the soft limit of the address space of each process to its present size, and back at the end.

    Memory that a process has freed inside of itself stays usable for it.
    """
    before: dict[int, tuple[int, int]] = {}
    try:
        for pid in pids:
            with contextlib.suppress(*GONE):
                size = int((PROC / str(pid) / "statm").read_text().split()[0]) * PAGE_BYTES
                hard = resource.prlimit(pid, resource.RLIMIT_AS)[1]
                before[pid] = resource.prlimit(pid, resource.RLIMIT_AS, (size, hard))
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(*GONE):
                resource.prlimit(pid, resource.RLIMIT_AS, limits)
