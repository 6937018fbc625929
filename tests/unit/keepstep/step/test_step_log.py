"""The step log: a numbered line an event, nothing without the variable; ``keepstep check-history`` reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.step.reporting.step_log import STEP_LOG_ENV, StepLog
from keepstep_chaos.histories.records import StepRecord, parse
from keepstep_mesh.protocol.membership import Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum

INFO = MemberInfo("http://a", "http://a")


def plan_of(quorum_id: int, *names: str, epoch: int = 1, previous: QuorumPlan | None = None) -> QuorumPlan:
    members = tuple(Member(name, 3, 1, 0, False, INFO) for name in names)
    quorum = Quorum(0, epoch, quorum_id, 0, 0, step=3, lineage=1, joiners=0, uniform=True, listed=members)
    return make_plan(quorum, names[0], previous)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STEP_LOG_ENV, str(tmp_path / "steps.jsonl"))
    return tmp_path / "steps.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_say_who_wrote_them_and_are_numbered(path: Path) -> None:
    logs = [StepLog("night", "a:1", rank) for rank in (0, 1)]
    for step in (1, 2, 3):
        for log in logs:
            log.write("committed", step, 7, epoch=2, participants=2, lineage=6)
    for log in logs:
        log.close()
        log.write("committed", 4, 7)
    assert [(one["job"], one["replica_id"], one["group_rank"], one["n"], one["step"]) for one in lines(path)] == [
        ("night", "a:1", rank, step, step) for step in (1, 2, 3) for rank in (0, 1)
    ]


def test_a_script_that_changes_to_another_folder_writes_to_the_same_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv(STEP_LOG_ENV, path.name)
    log = StepLog("night", "a:1", 0)
    (path.parent / "run").mkdir()
    monkeypatch.chdir(path.parent / "run")
    log.write("committed", 1, 7)
    log.close()
    assert [one["step"] for one in lines(path)] == [1]


def test_a_file_that_was_rotated_away_is_left(path: Path) -> None:
    log = StepLog("night", "a:1", 0)
    log.write("committed", 1, 7)
    path.rename(path.with_name("steps.jsonl.1"))
    log.write("committed", 2, 7)
    path.unlink()
    log.write("committed", 3, 7)
    log.close()
    assert [one["step"] for one in lines(path.with_name("steps.jsonl.1"))] == [1]
    assert [one["step"] for one in lines(path)] == [3]


def test_a_file_that_cannot_be_written_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_LOG_ENV, str(tmp_path / "nowhere" / "steps.jsonl"))
    with pytest.raises(
        ValueError, match=r"KEEPSTEP_STEP_LOG=.*steps\.jsonl cannot be opened for writing: No such file"
    ):
        StepLog("job", "a:1", 0)


def test_an_equal_list_that_came_again_is_compared_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    replica_ids = QuorumPlan.replica_ids.fget
    monkeypatch.setattr(QuorumPlan, "replica_ids", property(lambda plan: reads.append(plan) or replica_ids(plan)))
    log = StepLog("job", "a:1", 0)
    log.quorum(3, plan_of(1, "a:1", "b:1"), built=True)
    again = plan_of(1, "a:1", "b:1")
    reads.clear()
    for step in range(4, 10):
        log.quorum(step, replace(again, max_step=step), built=False)
    log.close()
    assert len(reads) == 2, "of the list before and of the one that came again"
    assert len(lines(path)) == 1


def test_a_quorum_is_written_when_it_is_another_or_its_group_was_built(path: Path) -> None:
    log = StepLog("job", "a:1", 0)
    first = plan_of(1, "a:1", "b:1")
    log.quorum(3, first, built=True)
    log.quorum(4, replace(first, max_step=4), built=False)
    log.quorum(5, plan_of(1, "a:1", "b:1"), built=False)  # the list came again
    log.quorum(6, plan_of(1, "a:1", "b:1", epoch=2), built=False)
    log.quorum(7, plan_of(1, "a:1", "c:1", epoch=2), built=False)
    log.quorum(8, plan_of(2, "a:1", "c:1", epoch=2), built=True)
    log.quorum(9, plan_of(2, "a:1", "c:1", epoch=2), built=True)
    log.close()
    assert [(one["step"], one["epoch"], one["quorum_id"], one["members"]) for one in lines(path)] == [
        (3, 1, 1, ["a:1", "b:1"]),
        (6, 2, 1, ["a:1", "b:1"]),
        (7, 2, 1, ["a:1", "c:1"]),
        (8, 2, 2, ["a:1", "c:1"]),
        (9, 2, 2, ["a:1", "c:1"]),
    ]
    assert {type(parse(line)) for line in path.read_bytes().splitlines()} == {StepRecord}


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STEP_LOG_ENV, raising=False)
    monkeypatch.chdir(tmp_path)
    log = StepLog("job", "a:1", 0)
    log.write("committed", 1, 1)
    log.quorum(1, plan_of(1, "a:1"), built=True)
    log.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_no_step_and_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv(STEP_LOG_ENV, "/dev/full")
    log = StepLog("night", "a:1", 0)
    for step in (1, 2):
        log.write("committed", step, 1)
    log.close()
    assert [record.getMessage().count("No space left on device") for record in caplog.records] == [1]


def test_a_line_that_a_full_disk_cut_off_does_not_spoil_the_next_one(path: Path) -> None:
    script = """
import os
import resource
from keepstep.step.reporting.step_log import StepLog

log = StepLog("night", "a:1", 0)
log.write("started", 0, 0, lineage="x")
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(log._file).st_size + 20, most))
log.write("committed", 1, 1, lineage="x")
log.write("committed", 2, 1, lineage="x")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
log.write("committed", 3, 1, lineage="x")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    first, cut, last = path.read_text().splitlines()
    assert json.loads(first)["n"] == 1
    assert len(cut) == 20
    assert json.loads(last)["n"] == 4, "the gap shows"
