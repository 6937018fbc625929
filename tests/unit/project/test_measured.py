"""The page of measured figures is as its script writes it, and names figures that are older than the code."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MEASURED = runpy.run_path(str(ROOT / "benchmarks" / "measured.py"))

FIGURE = {
    "name": "step, tiny", "unit": "ms", "statistic": "p50", "definition": "added", "keepstep": 0.2, "other": 1.0,
    "beside": "one machine",
    "ratio": 0.2, "limits": [0.5], "more_is_better": False, "reached": True,
    "samples": {"keepstep": [0.1, 0.2, 0.3], "other": [1.0]},
}  # fmt: skip


def results(*names: str, quick: bool = False, when: str = "2026-11-29T01:00:00+00:00") -> dict[str, object]:
    return {
        "when": when, "commit": "abcdef01", "quick": quick,
        "machine": {"processor": "P", "cores": 2, "python": "3.11", "load_before": 0.1},
        "versions": {"keepstep": "1"}, "benchmarks": {name: {"seconds": 5, "figures": [FIGURE]} for name in names},
    }  # fmt: skip


def test_the_page_is_as_its_script_writes_it_now() -> None:
    kept = json.loads((ROOT / "benchmarks" / "measured.json").read_text())
    assert MEASURED["page"](kept) == (ROOT / "benchmarks" / "MEASURED.md").read_text(), "run benchmarks/measured.py"


def test_the_tables_of_pages_are_as_the_script_writes_them_now() -> None:
    kept = json.loads((ROOT / "benchmarks" / "measured.json").read_text())
    for shown in MEASURED["SHOWN"]:
        text = (ROOT / shown.page).read_text()
        assert len(shown.lines(kept)) == 2 + len(shown.rows), f"every row of {shown.page} is measured"
        assert shown.written(text, kept) == text, "run benchmarks/measured.py"


def test_a_row_of_a_page_has_the_figure_of_its_name_before_one_that_begins_with_it() -> None:
    def figure(name: str, keepstep: float) -> dict[str, object]:
        return {**FIGURE, "name": name, "keepstep": keepstep}

    rows = (("a kill", "kill", "SIGKILL"), ("worst", "kill", "SIGKILL, m"), ("not measured", "heal", "heal"))
    shown = MEASURED["Shown"]("page.md", ("", "torchft", "keepstep", "ratio", "target", MEASURED["BENCH"]), rows)
    lines = shown.lines({"kill": {"figures": [figure("SIGKILL, max", 9.0), figure("SIGKILL", 0.05)]}})
    assert lines == [
        "| | torchft | keepstep | ratio | target | again with `make bench` |",
        "|---|---|---|---|---|---|",
        "| a kill | 1 ms | 0.05 ms | 0.2 | <= 0.5 reached | `BENCH=kill` |",
        "| worst | 1 ms | 9 ms | 0.2 | <= 0.5 reached | `BENCH=kill` |",
    ]
    old = f"a\n{lines[0]}\n|---|\n| old |\n\nb\n"
    assert shown.written(old, {}) == f"a\n{lines[0]}\n{lines[1]}\n\nb\n"
    with pytest.raises(ValueError, match=r"page\.md has 0 tables"):
        shown.written("a\n", {})


def test_a_run_replaces_its_own_benchmarks_and_a_quick_one_no_figure_of_a_whole_one() -> None:
    kept = MEASURED["merged"]({}, results("step", "kill"))
    assert kept["step"]["figures"][0]["samples"] == 3
    later = MEASURED["merged"](kept, results("step", "heal", quick=True, when="2026-11-30"))
    assert (later["step"], later["kill"]) == (kept["step"], kept["kill"])
    assert later["heal"]["quick"]
    assert MEASURED["merged"](later, results("heal"))["heal"]["quick"] is False


def test_the_table_of_a_run_and_the_page_name_what_was_measured_beside_keepstep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    try:
        report, figure = __import__("report"), __import__("figures").Figure
    finally:
        for name in ("report", "figures", "sides"):
            sys.modules.pop(name, None)
    found = [figure("back", "s", "p50", [30.0], [20.0], beside="on one machine"), figure("alone", "s", "p50", [1.0])]
    columns = {column.header: list(column.cells) for column in report.table(found).columns}
    assert (columns["other"], columns["beside"]) == (["20", ""], ["on one machine", ""])
    run = {**results(), "benchmarks": {"machines": {"seconds": 5, "figures": [one.record() for one in found]}}}
    kept = MEASURED["merged"]({}, run)
    kept["machines"]["changed_lines"] = 0
    assert "| back | s p50 of 1 | 30 | on one machine: 20 | 1.5 |  |" in MEASURED["page"](kept)
    assert "| alone | s p50 of 1 | 1 |  |  |  |" in MEASURED["page"](kept)


def test_the_page_says_how_much_code_has_changed_since() -> None:
    kept = MEASURED["merged"]({}, results("step"))
    kept["step"]["changed_lines"] = 0
    page = MEASURED["page"](kept)
    assert "| step, tiny | ms p50 of 3 / 1 | 0.2 | one machine: 1 | 0.2 | <= 0.5 reached |" in page
    assert "Older" not in page
    kept["step"]["changed_lines"] = 1200
    assert "**Older than the code:** 1,200 lines of what it measures" in " ".join(MEASURED["page"](kept).split())
    kept["step"]["changed_lines"] = None
    assert "**Of a commit that is not in this repository:**" in " ".join(MEASURED["page"](kept).split())


def test_changed_lines_are_those_of_python_in_the_folders(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    for folder in ("libs/a", "libs/b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.py").write_text("1\n2\n")
        (tmp_path / folder / "x.md").write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    first = git("rev-parse", "--short=8", "HEAD")
    (tmp_path / "libs/a/x.py").write_text("1\n3\n4\n")
    (tmp_path / "libs/a/x.md").write_text("2\n")
    assert MEASURED["changed_lines"](first, ("libs/a",), tmp_path) == 3
    git("commit", "-qam", "second")
    assert MEASURED["changed_lines"](f"{first}+", ("libs/a", "libs/b"), tmp_path) == 3
    assert MEASURED["changed_lines"](first, ("libs/b",), tmp_path) == 0
    assert MEASURED["changed_lines"]("12345678+", ("libs/b",), tmp_path) is None
