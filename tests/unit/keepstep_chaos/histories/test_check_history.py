"""``keepstep check-history`` as a command: files and folders, exit codes, what it prints."""

from __future__ import annotations

import json
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from keepstep_chaos.histories.rules import RULES
from keepstep_cli.main import main
from tests.simulation.checks.history import EVENTS, report_on
from tests.simulation.simulation import Simulation


@cache
def simulated() -> dict[str, list[str]]:
    """Logs of several groups that died and came back, under several epochs."""
    return next(filter(eventful, map(logs_of, count())))


def logs_of(seed: int) -> dict[str, list[str]]:
    simulation = Simulation(seed, lighthouses=1)
    simulation.run()
    return simulation.logs.lines


def eventful(logs: dict[str, list[str]]) -> bool:
    report = report_on(logs)
    job = report.jobs["job"]
    return report.epochs > 1 and job.incarnations > job.groups > 1 and job.steps_again > 0


def check(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check-history", *map(str, arguments)])


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    for name, lines in simulated().items():
        path = folder / ("lighthouse" if name == EVENTS else "steps") / name.replace(":", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
    return folder


def change(path: Path, line: int, **facts: object) -> None:
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), **facts})
    path.write_text("".join(f"{one}\n" for one in lines))


def test_a_folder_of_logs_is_read_and_summed_up(logs: Path) -> None:
    said = check(logs)
    assert said.exit_code == 0, said.output
    report = json.loads(check(logs, "--json").output)
    assert report["fine"]
    assert report["epochs"] > 1
    job = report["jobs"]["job"]
    assert job["incarnations"] > job["groups"] > 1
    assert f"{job['steps']} steps committed" in said.output
    assert said.output.endswith("no violation\n")
    assert all(rule in said.output for rule in RULES)
    assert set(report["checked"]) == set(RULES)
    assert "not covered" not in said.output


def test_files_may_be_named_one_by_one_in_any_order_and_twice(logs: Path) -> None:
    files = sorted(path for path in logs.rglob("*") if path.is_file())
    whole = check(logs).output
    assert check(*files).output == check(*reversed(files)).output == check(*files, logs, files[0]).output == whole


def test_a_violation_is_told_with_its_lines_and_what_it_means(logs: Path) -> None:
    path = next(path for path in sorted(logs.rglob("steps/*")) if '"committed"' in path.read_text())
    line = next(i for i, one in enumerate(path.read_text().splitlines(), 1) if '"committed"' in one)
    change(path, line, step=999)
    said = check(logs)
    assert said.exit_code == 1
    assert "VIOLATION (step_order, job job)" in said.output
    assert f"  {path}:{line}\n" in said.output
    assert f"that is: {RULES['step_order'].meaning}" in said.output
    assert "step_order (" in said.output.splitlines()[-1]
    report = json.loads(check(logs, "--json").output)
    assert not report["fine"]
    assert f"{path}:{line}" in report["violations"][0]["records"]


def test_a_log_that_was_rotated_is_one_log(logs: Path) -> None:
    path = logs / "lighthouse" / EVENTS
    before = json.loads(check(logs, "--json").output)
    lines = path.read_text().splitlines(keepends=True)
    half = next(i for i, one in enumerate(lines) if '"term"' in one) + 2
    path.with_name(f"{EVENTS}.1").write_text("".join(lines[:half]))
    path.write_text("".join(lines[half:]))
    assert json.loads(check(logs, "--json").output) == before
    assert check(path.with_name(f"{EVENTS}.1"), path).exit_code == 0


def test_a_line_that_a_kill_cut_off_is_named_and_is_no_violation(logs: Path) -> None:
    path = next(logs.rglob("steps/*"))
    with path.open("a") as file:
        file.write('{"t": 17')
    said = check(logs)
    assert said.exit_code == 0
    assert f"{path}:{len(path.read_text().splitlines())} is cut off" in said.output


def test_a_damaged_line_is_a_violation(logs: Path) -> None:
    path = next(logs.rglob("steps/*"))
    path.write_text(path.read_text().replace('"started"', '"star', 1))
    said = check(logs)
    assert said.exit_code == 1
    assert "unreadable" in said.output


def test_names_that_no_encoding_has_are_printed_anyway(tmp_path: Path) -> None:
    begun = {"id": (1 << 32) + 1, "epoch": 1, "job": "", "kind": "term", "replica_id": ""}
    lines = [{**begun, "detail": {"owner": "\ud800"}}, {**begun, "id": begun["id"] + 1, "detail": {"owner": "b"}}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "epoch 1 is used by \\ud800 and by b" in check(tmp_path).output


def test_other_files_of_a_folder_are_left_alone(logs: Path) -> None:
    (logs / "other.jsonl").write_text('{"loss": 0.5}\n')
    (logs / "train.log").write_text("step 1\n")
    (logs / "empty.jsonl").touch()
    said = check(logs)
    assert said.exit_code == 0
    assert f"{logs / 'other.jsonl'} is not a log of keepstep; skipped" in said.output
    assert "train.log" not in said.output


def test_a_missing_log_is_named(logs: Path) -> None:
    said = check(logs / "steps")
    assert said.exit_code == 0
    missing = "no event log of a lighthouse: start it with --event-log FILE. Not checked without it: one_owner"
    assert missing in said.output


def test_without_step_logs_the_rules_that_need_them_are_not_listed_as_checked(logs: Path) -> None:
    (logs / "steps").rename(logs.parent / "elsewhere")
    output = check(logs).output
    assert "Not checked without it: one_quorum, one_answer, one_state, one_end, step_order, member" in output
    checked = output.partition("checked:")[2].partition("not covered:")[0]
    assert "one_owner" in checked
    assert "one_state" not in checked


@pytest.mark.parametrize("content", ['{"loss": 0.5}\n', "step 1\n", "\0\n"])
def test_a_file_that_is_no_log_cannot_be_read(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(content)
    said = check(path)
    assert said.exit_code == 2
    assert f"{path} is neither the event log of a lighthouse nor the step log of a trainer" in said.output
    assert "KEEPSTEP_STEP_LOG" in said.output


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    assert check().exit_code == 2
    said = check(tmp_path)
    assert said.exit_code == 2
    assert "no logs in" in said.output
    said = check(tmp_path / "nowhere")
    assert said.exit_code == 2
    assert f"{tmp_path / 'nowhere'} cannot be read: No such file" in said.output
