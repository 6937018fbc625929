"""The two scripts of docs/epochs.md: the one of one process, and the one of groups, of which one is killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job
from tests.support.services.command import environment

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]

EXAMPLES = Path(__file__).parents[3] / "examples"
LINE = re.compile(r"epoch (\d+) lr (\S+) accuracy (\S+)")


def epochs(output: list[str]) -> list[tuple[int, str, float]]:
    """The epochs that a script completed, with the learning rate and the accuracy after each."""
    return [(int(one[1]), one[2], float(one[3])) for line in output if (one := LINE.match(line))]


def plain(saved: Path, number: int) -> list[tuple[int, str, float]]:
    command = [sys.executable, EXAMPLES / "train_epochs_plain.py"]
    done = subprocess.run(
        command,
        env=environment(SAVED=str(saved), EPOCHS=str(number), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=True,
    )
    return epochs(done.stdout.splitlines())


async def trained(job: Job, saved: Path, number: int, *, kill: bool) -> tuple[Group, Group]:
    """Train with two groups; kill one of them in its fourth epoch, and start it again."""
    variables = {
        "SCRIPTS": str(EXAMPLES / "train_epochs.py"),
        "SAVED": str(saved),
        "EPOCHS": str(number),
    }
    a, b = [await job.start(name, **variables) for name in "ab"]
    if kill:
        await job.until(lambda: len(epochs(b.output)) >= 3, "both train")
        b.kill()
        await b.exit_codes()
        b.output.clear()
        await job.start("b", **variables)
    assert [await group.exit_codes() for group in (a, b)] == [[0], [0]], job.report()
    return a, b


async def test_the_converted_script_does_what_the_plain_one_does_although_a_group_is_killed(tmp_path: Path) -> None:
    """Slow: four trainers and two runs of the plain script."""
    expected = plain(tmp_path / "plain", 12)
    async with Job("--initial-replicas", "2", "--verify-every", "5", min_replicas=2) as job:  # they wait for each other
        a, b = await trained(job, tmp_path / "saved", 12, kill=True)
        ends = [one for group in (a, b) for one in group.lines if one["event"] == "finished"]
        assert len({(one["step"], one["digest"]) for one in ends}) == 1, "equal weights and optimizers"
        assert ends[0]["step"] == 12 * 16, "as many steps as the plain script has batches"
        assert [one[:2] for one in epochs(a.output)] == [one[:2] for one in expected], "epochs and learning rates"
        # the killed group goes on in the epoch of the others; the last one may be there twice, before `finish` heals it
        since = epochs(b.output)
        assert since[0][0] > 3
        assert set(since) <= set(epochs(a.output))
        assert epochs(a.output)[-1][2] > 0.85
        assert expected[-1][2] > 0.85

    async with Job("--initial-replicas", "2", min_replicas=2) as job:
        a, b = await trained(job, tmp_path / "saved", 14, kill=False)
        more = plain(tmp_path / "plain", 14)
        for group in (a, b):
            assert [one[:2] for one in epochs(group.output)] == [one[:2] for one in more], "it resumes after epoch 12"
        assert len({one["digest"] for group in (a, b) for one in group.lines if one["event"] == "finished"}) == 1
