"""A check, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.gpu.rank import Rank

Result = dict[str, Any]
"""Figures of one rank, by name with unit (``freed, s``). A value under ``digest`` must be equal in all ranks."""
DIGEST = "digest"


@dataclass(frozen=True)
class Check:
    """Code that each rank runs in a process of its own.

    Attributes:
        name: in the table, and of ``--only``.
        what: the behavior that it shows, in one sentence.
        run: raises if the behavior is another.
        ranks: number of processes.
        seconds: deadline; then all its processes are killed.
        needs_gpu: why it cannot run on a CPU; empty: it runs there with Gloo.
        lost: ranks that are killed or stopped in it, whose result is not awaited.
        restarted: ranks that are started again after a signal has killed them.
        lighthouse: start a lighthouse for it.
        cannot_run: why it cannot run with this version of torch; empty: it can.
        sleeps: it hardly uses the machine, and runs beside the other checks from the begin on.
        whole_seconds: limit from the start of its processes on, which the time of the whole run sets.
    """

    name: str
    what: str
    run: Callable[[Rank], Result | None]
    ranks: int = 2
    seconds: float = 60.0
    needs_gpu: str = ""
    lost: frozenset[int] = frozenset()
    restarted: frozenset[int] = frozenset()
    lighthouse: bool = False
    cannot_run: str = ""
    sleeps: bool = False
    whole_seconds: float = float("inf")


@dataclass
class Outcome:
    """``figures``: of the rank with the lowest number. ``reason``: why it failed or was skipped."""

    name: str
    what: str
    state: Literal["passed", "failed", "skipped"]
    reason: str = ""
    seconds: float = 0.0
    figures: Result = field(default_factory=dict)
