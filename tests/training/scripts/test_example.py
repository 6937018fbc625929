"""examples/train_ddp.py and the demo, as a user runs them. Real training processes, a real lighthouse, real kills.

One run starts its Python processes as a user does, and imports torch in each, which alone takes seconds of CPU time.
The others start them from a fork server.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.histories.report import summary_lines, violation_lines
from tests.support.processes.forked import FORKS
from tests.support.services.command import Command, environment

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]
DEADLINE = 240.0


class Training(Command):
    """`keepstep run` of the example, with a lighthouse of its own."""

    def __init__(
        self, folder: Path, state: Path, repository: Path, replicas: int, *arguments: str, **variables: str
    ) -> None:
        log = folder / "steps.jsonl"
        self.logs = [state, log]
        flags = ["--replicas", str(replicas), "--grace", "60"]
        command = ["run", *flags, "--state-dir", str(state), "--", str(repository / "examples" / "train_ddp.py")]
        super().__init__(folder, *command, *arguments, deadline=DEADLINE, KEEPSTEP_STEP_LOG=str(log), **variables)

    def wait(self) -> int:
        """Its exit code. Fails when its logs show a violation."""
        code = super().wait()
        report = check_files(self.logs)
        assert report.fine, "\n".join([*violation_lines(report), *self.lines])
        assert report.event_logs, summary_lines(report)
        assert report.step_logs, summary_lines(report)
        return code

    def weights(self) -> list[str]:
        """The digest that each group printed at its end."""
        return [match[1] for line in self.lines if (match := re.search(r"test accuracy \S+ weights (\w+)", line))]


@pytest.fixture
def trainings(tmp_path: Path, repository: Path) -> Iterator[object]:
    started: list[Training] = []

    def train(replicas: int, *arguments: str, forked: bool = True) -> Training:
        state = tmp_path / f"state-{len(started)}"
        variables = {"OMP_NUM_THREADS": "1", **({FORKS: "1"} if forked else {})}
        started.append(Training(tmp_path, state, repository, replicas, *arguments, **variables))
        return started[-1]

    yield train
    for one in started:
        one.close()


def committed_steps(folder: Path) -> list[int]:
    entries = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
    return [entry["step"] for entry in entries if entry["event"] == "committed"]


def test_the_example_learns_and_goes_on_from_its_checkpoints(trainings, tmp_path: Path) -> None:
    """It takes long because it trains 230 steps on real digits."""
    first = trainings(2, "--steps", "200", "--checkpoints", "saved")
    assert first.wait() == 0, "\n".join(first.lines)
    assert len(first.weights()) == 2
    assert len(set(first.weights())) == 1
    assert not [line for line in first.lines if "restart" in line or "terminate" in line]
    accuracy = max(float(match[1]) for line in first.lines if (match := re.search(r"test accuracy (\S+)", line)))
    assert accuracy > 0.8
    assert max(committed_steps(tmp_path)) == 200
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["group-0.pt", "group-1.pt"]
    (tmp_path / "steps.jsonl").unlink()
    second = trainings(2, "--steps", "230", "--checkpoints", "saved")
    assert second.wait() == 0, "\n".join(second.lines)
    assert set(committed_steps(tmp_path)) == set(range(201, 231))
    assert len(set(second.weights())) == 1
    assert set(second.weights()) != set(first.weights())


def test_the_shortest_run_has_all_groups_from_its_first_step(trainings) -> None:
    """It takes long because each group is a new Python that imports torch, as a user's is."""
    run = trainings(2, "--steps", "3", forked=False)
    assert run.wait() == 0, "\n".join(run.lines)
    assert len(run.weights()) == 2
    assert len(set(run.weights())) == 1


def test_a_sigterm_ends_a_training_between_two_steps(trainings, tmp_path: Path) -> None:
    run = trainings(2, "--steps", "1000000000")
    run.wait_for(r"\[r\d/0\] step 10 ")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert not [line for line in run.lines if "Traceback" in line or "SIGKILL" in line or "killed" in line]


def demo(folder: Path, *flags: str, deadline: float = DEADLINE, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keepstep_cli", "demo", *flags],
        cwd=folder, env=environment(OMP_NUM_THREADS="1", **variables), capture_output=True, text=True,
        timeout=deadline, check=False,
    )  # fmt: skip


def test_the_short_demo_survives_and_writes_its_summary(tmp_path: Path) -> None:
    """It takes long because the groups start as those of a user, and r0 is killed when a restart is warm."""
    done = demo(tmp_path, "--short", "--summary", "summary.json", "--seconds", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [kill["victim"] for kill in summary["each_kill"]] == ["r0", "lighthouse"]
    assert summary["kills"] == summary["kills_survived"] == 2
    assert summary["weights_bit_identical"]
    assert done.stdout.index("restarts are warm from now on") < done.stdout.index("SIGKILL to r0")
    assert "weights bit-identical" in done.stdout
    assert summary["history"]["records"] > 100
    assert summary["history"]["violations"] == {}
    assert "history checked: read 1 event log and 3 step logs" in done.stdout


def test_the_resume_demo_ends_with_the_losses_of_an_undisturbed_job(tmp_path: Path) -> None:
    """It takes long because a job is launched three times, with all its services."""
    done = demo(tmp_path, "--resume", "--summary", "summary.json", "--seconds", "200", **{FORKS: "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 < summary["resumed_at_step"] <= summary["killed_at_step"] < summary["steps"]
    assert summary["losses_compared"] == 2 * summary["steps"]
    assert summary["steps_with_other_losses"] == []
    assert summary["weights_bit_identical"]
    assert summary["violations"] == {}


@pytest.mark.timeout(660)
def test_the_demo_with_one_copy_ends_with_the_shards_of_an_undisturbed_job(tmp_path: Path) -> None:
    """It takes long because the killed rank starts again, and a second job is launched."""
    done = demo(
        tmp_path,
        "--one-copy",
        "--short",
        "--summary",
        "summary.json",
        "--seconds",
        "600",
        deadline=640.0,
        **{FORKS: "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["kills"] == summary["kills_survived"] == 1
    assert summary["each_kill"][0]["rank"] == 0
    assert summary["each_kill"][0]["place_taken_by"] != summary["each_kill"][0]["member"]
    assert summary["each_kill"][0]["step"] < summary["steps"]
    assert summary["shards_bit_identical"]
    assert "SIGKILL to r" in done.stdout
    assert "after the kill" in done.stdout


def test_a_demo_that_takes_too_long_fails_and_says_what_was_printed_last(tmp_path: Path) -> None:
    done = demo(tmp_path, "--seconds", "1", **{FORKS: "1"})
    assert done.returncode != 0
    assert "the demo failed" in done.stdout
    assert (tmp_path / "demo-summary.json").exists()
