"""Measure the steps of groups that train while another group joins with 1 GiB of state.

Two groups train (``trainer.py``, 2.1 million parameters and 1 GiB more of state, 10 ms between steps) under a
lighthouse with a relay. A third group joins, trains, is killed, and joins again, with its imports and memory ready each
time. All groups wait for the joiner in one step, and stage the state in the step before: these two are the stall. The
other steps near a join (from its start until ``NEAR_SECONDS`` after the joiner's first commit) are compared with those
further away, each in medians of the far steps with as many groups: three trainers on two cores are slower than two,
with or without a join. Joiner and relay have separate hosts in practice, so they run at the lowest priority: their use
of the processors is not part of the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from figures import Figure, Limit, p50, p99
from kill_to_commit import GIVE_UP, GROUPS, Group, last_commit
from sides import Lighthouse, Side, lighthouse, relay

NEAR_SECONDS = 2.0
FAR_SECONDS = 4.0
JOINS = 3
POLL = 0.05
ASIDE = ("nice", "-n", "19")
"""Before the command of what has another host where it matters."""


@dataclass(frozen=True)
class Step:
    when: float
    """Unix time of its commit."""
    groups: int
    seconds: float
    gap: float
    """Since the commit before."""


@dataclass
class Found:
    """All times in seconds, near and far in medians."""

    stalls: list[float] = field(default_factory=list)
    other_gaps: list[float] = field(default_factory=list)
    """The longest one near each join."""
    heals: list[float] = field(default_factory=list)
    """Seconds of the joiner's transfer. keepstep only."""
    near: list[float] = field(default_factory=list)
    far: list[float] = field(default_factory=list)
    median_ms: dict[int, float] = field(default_factory=dict)
    """Of the steps far from a join, by number of groups."""

    def add(self, steps: list[Step], cue: float, joined: float) -> None:
        """Add one join, as group 0 saw it."""
        near = [step for step in steps if cue < step.when <= joined + NEAR_SECONDS]
        far = [step for step in steps if cue - FAR_SECONDS < step.when <= cue or step.when > joined + NEAR_SECONDS]
        far = [step for step in far if step.when < joined + NEAR_SECONDS + FAR_SECONDS]
        second = max(range(1, len(near)), key=lambda number: near[number - 1].gap + near[number].gap)
        self.stalls.append(near[second - 1].gap + near[second].gap)
        rest = near[: second - 1] + near[second + 1 :]
        self.other_gaps.append(max(step.gap for step in rest))
        for groups in (GROUPS - 1, GROUPS):
            median = statistics.median(step.seconds for step in far if step.groups == groups)
            self.median_ms[groups] = median * 1e3
            self.near += [step.seconds / median for step in rest if step.groups == groups]
            self.far += [step.seconds / median for step in far if step.groups == groups]


def steps_of(group: Group) -> list[Step]:
    lines = [line.split() for line in group.commits.read_text().rpartition("\n")[0].splitlines()]
    times = [float(when) for when, *_ in lines]
    return [
        Step(when, int(groups), float(seconds), when - before)
        for before, when, (_, _, groups, seconds) in zip(times, times[1:], lines[1:], strict=False)
    ]


async def relay_known(server: Lighthouse) -> None:
    async with asyncio.timeout(GIVE_UP), aiohttp.ClientSession(server.address) as http:
        while True:
            async with http.get("/v1/cluster") as answer:
                if (await answer.json())["services"]:
                    return
            await asyncio.sleep(POLL)


def measure(side: Side, joins: int, mebibytes: int, log: Path) -> Found:
    found = Found()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(lighthouse(side, min_replicas=GROUPS - 1, log=log))
        if side.name == "keepstep":
            stack.enter_context(relay(side, log, "--lighthouse", server.address, command=ASIDE))
            asyncio.run(relay_known(server))
        flags = ("--model", "medium", "--ballast-mib", str(mebibytes))
        others = [Group(side, number, server, folder, log, *flags) for number in range(GROUPS - 1)]
        joiner = Group(side, GROUPS - 1, server, folder, log, *flags, command=ASIDE)
        for group in (*others, joiner):
            stack.callback(group.end)
            group.prepare()
        for group in others:
            group.start()
        for turn in range(joins):
            last_commit(others, time.time(), (GROUPS - 1).__eq__)
            time.sleep(FAR_SECONDS + (NEAR_SECONDS if turn == 0 else 0))  # steps far from any join are what is measured
            cue = time.time()
            joiner.start()
            joined = last_commit([joiner], cue, GROUPS.__eq__)
            time.sleep(NEAR_SECONDS + FAR_SECONDS)  # and those near it, then far again
            found.add(steps_of(others[0]), cue, joined)
            found.heals += _heals(Path(f"{joiner.commits}.jsonl"))
            print(f"join of {mebibytes} MiB, {side.name}: one step took {found.stalls[-1]:.2f} s", flush=True)
            joiner.process.kill()
            joiner.process.wait()
            if turn < joins - 1:
                joiner.prepare()
    return found


def _heals(step_log: Path) -> list[float]:
    lines = step_log.read_text().splitlines() if step_log.exists() else []
    return [one["seconds"] for one in map(json.loads, lines) if one.get("event") == "healed"]


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    joins, mebibytes = (2, 128) if quick else (JOINS, 1024)
    other = measure(theirs, max(1, joins // 2), mebibytes, log)
    mine = measure(ours, joins, mebibytes, log)
    label = f"a third group joins with {mebibytes} MiB"
    also: dict[str, object] = {
        "transfer_s": mine.heals,
        "longest_other_gap_s": {"keepstep": mine.other_gaps, "torchft": other.other_gaps},
        "median_step_ms": {"keepstep": mine.median_ms, "torchft": other.median_ms},
    }
    near = "one step of group 0 near a join, without the stall, in medians of the steps far from one"
    return [
        Figure(
            f"{label}: the one stall",
            "s",
            "p50",
            mine.stalls,
            other.stalls,
            definition="of two steps, commit to commit",
            also=also,
        ),
        Figure(
            f"{label}: other steps near it, p99",
            "x median",
            "p99",
            mine.near,
            other.near,
            Limit(value=1.1 * p99(mine.far)),
            definition=near,
            also={"far_p99": {"keepstep": p99(mine.far), "torchft": p99(other.far)}},
        ),
        Figure(
            f"{label}: other steps near it, p50",
            "x median",
            "p50",
            mine.near,
            other.near,
            Limit(value=1.1 * p50(mine.far)),
        ),
        Figure(f"{label}: steps far from a join, p99", "x median", "p99", mine.far, other.far),
    ]
