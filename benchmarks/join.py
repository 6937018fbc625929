"""Measure the longest step of the others while a group joins with 1 GiB of state over 1 Gbit/s.

Each of three groups and the lighthouse have a host of their own: network namespaces whose links carry 1 Gbit/s. Two
groups train (``trainer.py``, 32 MiB of gradients). The third joins, with its imports done and its memory ready; it is
killed some seconds after its first commit that counts it, and joins again. keepstep's source sends its state at most at
``UPLINK``, so that gradients have the rest of the link.

A join lasts from the start of the group to its first commit as an equal. The figure is the longest time between two
commits of group 0 in it, and beside it the limit: the copy of the state in the source, and two median steps. Groups
that catch up rehearse a step before they join. At the end, the bits of the weights of all groups must have been equal
at every step at which two of them wrote them.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from figures import Figure, Limit
from kill_to_commit import GROUPS, Group, last_commit
from sides import ROOT, Side, lighthouse

sys.path.insert(0, str(ROOT))
from tests.support.network.namespaces import Namespaces, why_not

RATE = "1gbit"
UPLINK = 40e6
"""Bytes per second; a third of the link."""
JOINS = 1
BASELINE_JOINS = 1
BEFORE_SECONDS = 6.0
"""Between two joins; its steps are those of the median."""
AFTER_SECONDS = 2.0
STAGING_SECONDS = 0.03
"""For 1 GiB on the training thread of the source."""


class Hosts(Side):
    """A side whose state leaves its hosts at most at ``UPLINK``."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "KEEPSTEP_UPLINK_BYTES_PER_SECOND": str(UPLINK)}


class Joins:
    """The samples of one way to join, in seconds."""

    def __init__(self) -> None:
        self.longest: list[float] = []
        self.median: list[float] = []
        """Of the steps of three groups outside of joins."""
        self.lasted: list[float] = []
        """From the start of the group to its first commit as an equal."""
        self.steps: list[int] = []
        """Steps of the others in that time."""


def commits_of(group: Group) -> list[float]:
    lines = group.commits.read_text().rpartition("\n")[0].splitlines()
    return [float(line.split()[0]) for line in lines]


def measure(side: Side, joins: int, mebibytes: int, log: Path, *flags: str) -> Joins:
    found = Joins()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        network = stack.enter_context(Namespaces())
        hosts = [network.host(f"group-{number}") for number in range(GROUPS)]
        for number in range(GROUPS):
            network.limit(f"group-{number}", RATE)
        place = network.host("lighthouse")
        server = stack.enter_context(
            lighthouse(side, GROUPS - 1, log, address=place.address, prefix=tuple(place.command))
        )
        common = ("--model", "large", "--ballast-mib", str(mebibytes), *flags)
        groups = []
        for number, host in enumerate(hosts):
            own = ("--address", host.address, "--digests", str(folder / f"digests-{number}"))
            groups.append(Group(side, number, server, folder, log, *common, *own, command=tuple(host.command)))
        *others, joiner = groups
        for group in groups:
            stack.callback(group.end)
            group.prepare()
        for group in others:
            group.start()
        for turn in range(joins):
            last_commit(others, time.time(), (GROUPS - 1).__eq__)
            time.sleep(BEFORE_SECONDS if turn == 0 else 0)  # the steps before the first join are measured
            cue = time.time()
            joiner.start()
            joined = last_commit([joiner], cue, GROUPS.__eq__)
            time.sleep(BEFORE_SECONDS + AFTER_SECONDS)  # the steps of three groups are measured
            times = commits_of(others[0])
            gaps = [(after, after - before) for before, after in itertools.pairwise(times)]
            near = [gap for when, gap in gaps if cue < when <= joined + AFTER_SECONDS]
            found.longest.append(max(near))
            found.median.append(statistics.median(gap for when, gap in gaps if when > joined + AFTER_SECONDS))
            found.lasted.append(joined - cue)
            found.steps.append(len(near))
            print(
                f"join {turn + 1} {' '.join(flags)}: longest {near and max(near):.2f} s of {len(near)} steps, median "
                f"{found.median[-1]:.2f} s, equal after {found.lasted[-1]:.1f} s",
                flush=True,
            )
            if turn < joins - 1:
                joiner.prepare()
            joiner.process.kill()
            joiner.process.wait()
        check_digests(folder)
    return found


def check_digests(folder: Path) -> None:
    """RuntimeError unless the weights of all groups were equal at each step, and two groups wrote at least one."""
    seen: dict[str, set[str]] = defaultdict(set)
    writers: dict[str, int] = defaultdict(int)
    for path in folder.glob("digests-*"):
        for line in path.read_text().splitlines():
            step, digest = line.split()
            seen[step].add(digest)
            writers[step] += 1
    if differ := [step for step, digests in seen.items() if len(digests) > 1]:
        raise RuntimeError(f"the weights of the groups differ at steps {differ[:10]}")
    if max(writers.values(), default=0) < GROUPS:
        raise RuntimeError("no step was compared in all groups")


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    if reason := why_not():
        print(f"join over {RATE}/s: left out: {reason}", flush=True)
        return []
    joins, mebibytes = (1, 128) if quick else (JOINS, 1024)
    caught_up = measure(Hosts(ours.name, ours.python), joins, mebibytes, log, "--catch-up", "--rehearse")
    other = measure(theirs, BASELINE_JOINS, mebibytes, log)
    both = {"keepstep": caught_up, "torchft": other}
    also: dict[str, object] = {
        "median_step_s": {name: one.median for name, one in both.items()},
        "until_equal_s": {name: one.lasted for name, one in both.items()},
        "steps_meanwhile": {name: one.steps for name, one in both.items()},
    }
    return [
        Figure(
            f"a third group joins with {mebibytes} MiB over {RATE}/s: longest step of the others",
            "s",
            "max",
            caught_up.longest,
            other.longest,
            Limit(value=STAGING_SECONDS * mebibytes / 1024 + 2 * statistics.median(caught_up.median)),
            definition="commit to commit, with nothing configured; theirs waits for the whole transfer",
            also=also,
        )
    ]
