"""Measure the death of a machine that has a rank of a group of two, beside that of a machine that has both ranks.

Two groups of two ranks train under one lighthouse with default limits (heartbeat timeout: 5 s). Network namespaces
stand for machines. The machine dies as at a loss of power: it no longer answers, then its processes get SIGKILL, so no
one hears of it. As soon as all ranks of the group have ended, both start again, with their imports done, one of them on
a new machine. So a group on two machines also waits until the rank that is left notices, and ends.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from figures import Figure
from sides import HERE, ROOT, free_port, keepstep_side, lighthouse

sys.path.insert(0, str(ROOT))
from tests.support.network.namespaces import Host, Namespaces, why_not

RANKS = 2
TIMES, QUICK_TIMES = 2, 1
SETTLE_SECONDS = 1.0
"""Time in which both groups commit together before a machine dies."""
DEADLINE = 120.0
POLL = 0.002
ALONE = "a group on one machine, which dies"
KINDS: dict[str, int | None] = {
    ALONE: None,
    "a group on two machines, that of rank 0 dies": 0,
    "a group on two machines, that of rank 1 dies": 1,
}
"""The rank whose machine dies; None: one machine has both."""


@dataclass(frozen=True)
class Machine:
    """A network namespace."""

    name: str
    host: Host


class Group:
    """The ranks of one start of a group. They have done their imports and wait for ``begin``."""

    def __init__(self, number: int, machines: list[Machine], server: str, folder: Path, log: Path) -> None:
        self.machines = machines
        self._files, self.processes = [], []
        port = free_port()
        for rank, host in enumerate(one.host for one in machines):
            self._files.append(folder / f"{number}.{rank}.{port}")
            variables = {
                **keepstep_side().environment(),
                "REPLICA_GROUP_ID": str(number),
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": machines[0].host.address,
                "MASTER_PORT": str(port),
            }
            script = HERE / "machines_trainer.py"
            command = [*host.command, sys.executable, script, server, host.address, self._files[rank]]
            with log.open("ab") as errors:
                self.processes.append(
                    subprocess.Popen(
                        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
                    )
                )
        for process in self.processes:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"a trainer did not start; see {log}")

    def begin(self) -> None:
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def first_commit(self, after: float, groups: int) -> float | None:
        """Return the time of the first commit after ``after`` with so many groups, of the later rank."""
        found = []
        for file in self._files:
            lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
            times = (float(line.split()[0]) for line in lines if int(line.split()[1]) == groups)
            found.append(next((when for when in times if when > after), None))
        return None if None in found else max(found)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def until(found: Callable[[], float | None], what: str) -> float:
    """Poll until ``found`` returns a value, and return it."""
    end = time.monotonic() + DEADLINE
    while not (value := found()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {DEADLINE:g} s")
        time.sleep(POLL)  # trainers only write lines to files
    return value


class Deaths:
    """The samples of one kind, in seconds after the death."""

    def __init__(self) -> None:
        self.others: list[float] = []
        """The other group's next commit."""
        self.ended: list[float] = []
        """The end of the last rank of the group."""
        self.back: list[float] = []
        """The group's own next commit, of both ranks."""


def measure(kind: str, times: int, log: Path) -> Deaths:
    seen, dies, numbers = Deaths(), KINDS[kind], itertools.count()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(Namespaces())
        place = network.host("lighthouse")
        server = stack.enter_context(
            lighthouse(keepstep_side(), 1, log, address=place.address, prefix=place.command)
        ).address

        def machine() -> Machine:
            name = f"m{next(numbers)}"
            return Machine(name, network.host(name))

        def group(number: int, machines: list[Machine]) -> Group:
            made = Group(number, machines, server, folder, log)
            stack.callback(made.kill)
            return made

        stays = group(0, [machine()] * RANKS)
        now = group(1, [machine()] * RANKS if dies is None else [machine() for _ in range(RANKS)])
        stays.begin()
        now.begin()
        for number in range(times):
            dead, new = now.machines[dies or 0], machine()
            following = group(1, [new if one is dead else one for one in now.machines])
            until(partial(now.first_commit, 0.0, 2), "both groups train")
            time.sleep(SETTLE_SECONDS)  # they train on
            began = time.time()
            network.unplug(dead.name)
            for one, process in zip(now.machines, now.processes, strict=True):
                if one is dead:
                    process.kill()
            until(now.ended, "the group ends")
            seen.ended.append(time.time() - began)
            following.begin()
            seen.back.append(until(partial(following.first_commit, began, 2), "the group is back") - began)
            seen.others.append(until(partial(stays.first_commit, began, 1), "the other group goes on") - began)
            print(f"{kind}, {number + 1} of {times}: back after {seen.back[-1]:.2f} s", flush=True)
            now = following
    return seen


def run(*, quick: bool, log: Path) -> list[Figure]:
    if reason := why_not():
        print(f"machines of a group: left out: {reason}", flush=True)
        return []
    deaths = {kind: measure(kind, QUICK_TIMES if quick else TIMES, log) for kind in KINDS}
    alone = deaths.pop(ALONE)
    return [
        Figure(
            f"{kind}: its next commit",
            "s",
            "p50",
            seen.back,
            alone.back,
            beside="on one machine",
            definition="from the death of the machine to the first commit of both ranks of the group",
            also={
                "group_ended_s": seen.ended,
                "other_group_commits_s": seen.others,
                "one_machine_group_ended_s": alone.ended,
                "one_machine_other_group_commits_s": alone.others,
            },
        )
        for kind, seen in deaths.items()
    ]
