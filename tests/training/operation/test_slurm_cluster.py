"""deploy/slurm/group.sbatch as a job array of a real Slurm, whose nodes are all on this machine.

Slow: each test trains in several processes, which Slurm starts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploy.slurm_cluster import SlurmCluster, why_not
from tests.support.jobs.job import TRAINER
from tests.support.services.lighthouse_driver import lighthouse

REASON = why_not()
pytestmark = [
    pytest.mark.training,
    pytest.mark.timeout(400),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "slurm" / "group.sbatch"
ONE_COPY = ROOT / "examples" / "one_copy.py"
PLAIN = ROOT / "tests" / "support" / "jobs" / "plain_fsdp2.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")


class Trainers:
    """The processes of ``TRAINER`` of a task, by its log."""

    def __init__(self, slurm: SlurmCluster, task: int) -> None:
        self._slurm, self._task = slurm, task

    def _events(self, kind: str) -> Iterator[dict[str, Any]]:
        for line in re.findall(r'^\[r\d/0\] \d+: (\{"event".*\})$', self._slurm.log(self._task), re.MULTILINE):
            event = json.loads(line)
            if event["event"] == kind:
                yield event

    def started(self) -> list[dict[str, Any]]:
        return list(self._events("started"))

    def commits(self, pid: int | None = None) -> dict[int, str]:
        """Map each step that a process has committed, or any, to its digest."""
        return {one["step"]: one["digest"] for one in self._events("committed") if pid in (None, one["pid"])}

    def train(self, starts: int) -> bool:
        """Return whether both ranks of this start have committed some steps."""
        return len(self.started()) == 2 * starts and all(
            len(self.commits(one["pid"])) >= 5 for one in self.started()[-2:]
        )


async def test_groups_of_two_nodes_start_again_as_a_whole_leave_at_a_notice_and_come_back(tmp_path: Path) -> None:
    async with lighthouse() as service, SlurmCluster(tmp_path, nodes=4) as slurm:
        variables = {"KEEPSTEP_LIGHTHOUSE": service.address, "OMP_NUM_THREADS": "1"}
        words = ("--array=0-1", "--nodes=2", "--cpus-per-task=1", str(SCRIPT), str(TRAINER))
        array = await slurm.submit(*words, **variables)
        stays, dies = Trainers(slurm, 0), Trainers(slurm, 1)
        await slurm.until(lambda: stays.train(1) and dies.train(1), "both groups train")
        assert sorted(one["rank"] for one in dies.started()) == [0, 1]

        os.kill(next(one["pid"] for one in dies.started() if one["rank"] == 1), signal.SIGKILL)
        await slurm.until(lambda: dies.train(2), "both ranks of the group are started again")

        before = len(stays.commits())
        await slurm.run("scancel", "--batch", "--signal=USR1", f"{array}_1")  # as Slurm at --signal=B:USR1@120
        await slurm.until_state(f"{array}_1", "PENDING")
        await slurm.until(lambda: len(stays.commits()) > before + 10, "the other group goes on")
        # Slurm would wait for two minutes. A node refuses a job in the second in which it ended there.
        await slurm.run("scontrol", "update", f"job={array}_1", "starttime=now+3")
        await slurm.until(lambda: dies.train(3), "the group is back")
        assert len(stays.started()) == 2

        await slurm.run("keepstep", "drain", "r0", "r1", "--yes", **variables)
        await slurm.until_state(array, "COMPLETED")
        ends = [trainers.commits() for trainers in (stays, dies)]
        common = ends[0].keys() & ends[1].keys()
        assert len(common) > 20
        assert [ends[0][step] for step in common] == [ends[1][step] for step in common]


async def test_a_model_that_exists_once_loses_no_step_with_a_member(tmp_path: Path) -> None:
    """Two members of two ranks and a spare; the weights are those of the same script in plain FSDP2."""
    async with lighthouse() as service, SlurmCluster(tmp_path, nodes=3) as slurm:
        last = tmp_path / "steps"
        last.write_text("1000000")
        variables = {
            "KEEPSTEP_LIGHTHOUSE": service.address,
            "KEEPSTEP_SPARES": "1",
            "RANKS": "2",
            "EVERY": "5",
            "PAUSE": "0.05",
            "STEPS": str(last),
        }
        array = await slurm.submit("--array=0-2", "--cpus-per-task=4", str(SCRIPT), str(ONE_COPY), **variables)

        def events(kind: str) -> list[dict[str, Any]]:
            return [one.detail for one in service.events.newest("default", 500) if one.kind == kind]

        def steps(task: int) -> list[int]:
            return [int(step) for step in re.findall(r"of 4 step (\d+) loss", slurm.log(task))]

        await slurm.until(
            lambda: (
                all("is ready" in slurm.log(task) for task in range(3)) and sum(map(bool, map(steps, range(3)))) == 2
            ),
            "two members train, and a spare stands by",
        )
        killed = next(task for task in range(3) if steps(task))
        pids = re.search(r"started, pid (\d+)", slurm.log(killed))
        assert pids is not None
        os.kill(int(pids[1]), signal.SIGKILL)
        await slurm.until(lambda: len(events("world_formed")) == 2, "the job goes on")
        target = max(step for task in range(3) for step in steps(task)) + 100
        (tmp_path / "target").write_text(str(target))
        (tmp_path / "target").replace(last)
        await slurm.until_state(array, "COMPLETED")
        assert [one["how"] for one in events("world_formed")] == ["fresh", "replaced"]

        def shards(text: str) -> set[str]:
            return set(re.findall(rf"rank \d of 4 step {target} shard [0-9a-f]{{16}}", text))

        plain = await slurm.run(*TORCHRUN, str(PLAIN), STEPS=str(target), EVERY="1000000")
        assert len(shards(plain)) == 4
        assert shards("\n".join(slurm.log(task) for task in range(3))) == shards(plain)
