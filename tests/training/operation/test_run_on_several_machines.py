"""A group on two machines, with `keepstep run --nnodes 2` on each: a rank is killed, and a machine goes away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keepstep_mesh.exit_codes import EXIT_GROUP_FAILED
from tests.support.jobs.job import SCRIPTS
from tests.support.network.ports import free_port
from tests.support.processes.forked import FORKS
from tests.support.services.command import Command, service_process

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[3] / "examples" / "train_hsdp.py"


class Machines:
    """The machines of a job of two groups on this one, each with a rank."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        self._folder, self._lighthouse = folder, lighthouse
        self.hold = folder / "hold"
        """While this file exists, a rank that starts does not begin, and the other group trains alone."""
        self._ports = [free_port(), free_port()]
        self.runs: dict[tuple[int, int], Command] = {}
        """By group and number of the machine."""

    def start(self, group: int, machine: int) -> Command:
        flags = {
            "--lighthouse": self._lighthouse,
            "--replicas": 1,
            "--first-replica": group,
            "--replicas-in-job": 2,
            "--nnodes": 2,
            "--node-rank": machine,
            "--master-addr": "localhost",
            "--master-port": self._ports[group],
            "--max-restart-pause": 1,
        }
        arguments = [str(word) for flag in flags.items() for word in flag]
        script = {"SCRIPTS": str(SCRIPT), "STEPS": "1000000000", "PACE": "0.03", "HOLD": str(self.hold)}
        command = ("run", *arguments, "--", str(SCRIPTS))
        run = Command(self._folder, *command, deadline=300.0, **{FORKS: "1"}, **script)
        self.runs[group, machine] = run
        return run

    def end(self) -> list[int]:
        """End all; return the exit codes."""
        for run in self.runs.values():
            run.process.send_signal(signal.SIGTERM)
        return [run.wait() for run in self.runs.values()]

    def close(self) -> None:
        for run in self.runs.values():
            run.close()


@asynccontextmanager
async def machines(folder: Path) -> AsyncIterator[Machines]:
    flags = ("--initial-replicas", "2", "--event-log", str(folder / "events.jsonl"), "--verify-every", "5")
    async with service_process("lighthouse", *flags) as (_, address):
        all_of_them = Machines(folder, address)
        try:
            yield all_of_them
        finally:
            await asyncio.to_thread(all_of_them.close)


def scenario(job: Machines) -> None:
    first, _, other, last = [job.start(group, machine) for group in range(2) for machine in range(2)]
    for run in (first, other):
        run.wait_for("step .* groups 2")

    rank = int(last.wait_for(r"\[r1\] started, pid (\d+)")[1])
    job.hold.touch()
    os.kill(rank, signal.SIGKILL)
    last.wait_for("rank 0 was killed by SIGKILL")
    other.wait_for(f"rank 0 exited with ({EXIT_GROUP_FAILED}|1)")  # torch's collective may notice the death first
    first.wait_for("step .* groups 1")
    job.hold.unlink()
    other.wait_for("step .* groups 2")

    job.hold.touch()
    last.process.send_signal(signal.SIGTERM)  # the notice that this machine ends
    assert last.wait() == 128 + signal.SIGTERM
    other.wait_for(f"rank 0 exited with ({EXIT_GROUP_FAILED}|1)")  # not 0: the group shall come back
    first.wait_for("step .* groups 1")
    job.hold.unlink()
    job.start(1, 1)
    other.wait_for("step .* groups 2")
    first.wait_for("step .* groups 2")
    assert set(job.end()) == {128 + signal.SIGTERM}


async def test_a_group_of_two_machines_starts_again_on_both_after_one_loses_a_rank_or_goes(tmp_path: Path) -> None:
    """Slow: four trainers, two of them three times."""
    async with machines(tmp_path) as job:
        await asyncio.to_thread(scenario, job)
    events = (tmp_path / "events.jsonl").read_text()
    assert '"replicas_verified"' in events, "equal weights"
    assert '"replicas_differ"' not in events
