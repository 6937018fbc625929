"""A machine that fails its checks does not join; `keepstep run` starts the group again, and it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep_mesh.exit_codes import EXIT_PREFLIGHT
from tests.support.processes.forked import FORKS
from tests.support.services.command import Command

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

TRAINER = Path(__file__).parents[2] / "support/jobs/trainer.py"


def started(folder: Path, *flags: str, ranks: int = 1) -> Command:
    return Command(
        folder,
        "run",
        "--replicas",
        "1",
        "--nproc-per-replica",
        str(ranks),
        *flags,
        "--",
        str(TRAINER),
        deadline=240.0,
        TRAINER_STEPS="3",
        **{FORKS: "1"},
    )


def test_a_group_of_a_machine_that_fails_an_own_check_waits_and_then_trains(tmp_path: Path) -> None:
    check = f"command=test -e {tmp_path}/repaired || {{ touch {tmp_path}/repaired; echo fan is off; exit 3; }}"
    run = started(tmp_path, "--check-with", check, "--check-pause", "1", ranks=2)
    try:
        assert run.wait() == 0, run.lines
    finally:
        run.close()
    text = "\n".join(run.lines)
    assert "this machine may not join the job: host " in text
    assert "exit code 3: fan is off" in text
    assert f"rank 0 exited with {EXIT_PREFLIGHT}" in text
    assert "refused by the checks of its machine, 1 in a row" in text
    assert "restart 1 of 100 in 1.00 s" in text
    assert '"event": "committed", ' in text


def test_run_ends_with_the_code_of_the_check_if_no_restart_is_left(tmp_path: Path) -> None:
    run = started(tmp_path, "--check", "--check-with", f"disk={tmp_path}:1000T", "--max-restarts", "0")
    try:
        assert run.wait() == EXIT_PREFLIGHT, run.lines
    finally:
        run.close()
    assert any(f"disk {tmp_path}: " in line and "(at least 1024000.0 GiB)" in line for line in run.lines), run.lines


def test_a_check_of_an_unknown_form_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = started(tmp_path, "--check-with", "gpu")
    try:
        assert run.wait() == 2
    finally:
        run.close()
    assert any(
        "--check-with: check 'gpu' is unknown; the forms are: builtin, memory=SIZE" in line for line in run.lines
    )
