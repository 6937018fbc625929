"""Measure the pause of training after the death of the leading lighthouse. keepstep only: torchft has no standby.

This runs two of the fault runs (``make faults``, ``tests/faults/rows.py``): two lighthouses share a real etcd of one
node, groups train (gloo, a small network, 10 ms between steps in place of loading data), and the leader gets SIGKILL,
or SIGTERM, again and again. The figure is the longest time between two commits of a group, from one second before the
signal until 100 steps after it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from figures import Figure, Limit, p50
from sides import ROOT, Side

sys.path.insert(0, str(ROOT))

from tests.faults.rows import play

SCENES = (("leader_killed", "SIGKILL", 15, "p95", 1.0), ("leader_stopped", "SIGTERM", 8, "max", 0.2))
"""Row, signal, how many times, statistic, most seconds."""
QUICK_KILLS = 5


def run(_ours: Side, _theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    figures = []
    for row, how, kills, statistic, limit in SCENES:
        print(f"{how} to the leading lighthouse, again and again:", flush=True)
        outcome = asyncio.run(play(row, QUICK_KILLS if quick else kills, keep=log.parent))
        if not outcome.seconds or outcome.violations:
            raise RuntimeError(f"{row}: {outcome.broken}; see {log.parent / row}")
        figures.append(
            Figure(
                f"{how} to the leading lighthouse: gap between commits, {statistic}",
                "s",
                statistic,
                outcome.seconds,
                limit=Limit(value=limit),
                definition="longest time between two commits around the end of the leader, a standby on the same etcd",
                also={"p50": p50(outcome.seconds), "max": max(outcome.seconds), "broken": outcome.broken},
            )
        )
    return figures
