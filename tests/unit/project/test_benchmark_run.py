"""A run of benchmarks says how far it is, keeps each result, and goes on after a benchmark that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SCRIPT = """
import pathlib, sys, time
import run
from figures import Figure

def good(*, quick, log):
    kept = [*pathlib.Path(sys.argv[1]).glob("results.json")]
    return [Figure("a figure", "s", "p50", [float(len(kept))])]

def broken(*, quick, log):
    raise OSError("no such disk")

def hangs(*, quick, log):
    time.sleep(60)  # until the limit

run.WORK, run.LIMIT_SECONDS = pathlib.Path(sys.argv[1]), 1
run.ALONE.update(rank=good, rebuild=broken, relay=hangs, loss=good)
run.main(["rank", "rebuild", "relay", "loss"])
"""


def test_a_run_goes_on_after_benchmarks_that_fail_and_keeps_each_result(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.endswith("failed: rebuild, relay\n")
    assert "OSError: no such disk" in ended.stderr
    assert "TimeoutError: not ended within 1 s" in ended.stderr
    said = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert [line.split(":")[0] for line in said] == [
        "[1 of 4] rank",
        "[2 of 4] rebuild",
        "[3 of 4] relay",
        "[4 of 4] loss",
    ]
    assert all(line.endswith(" s so far") for line in said)
    kept = json.loads((tmp_path / "results.json").read_text())["benchmarks"]
    assert list(kept) == ["rank", "loss"]
    assert kept["loss"]["figures"][0]["keepstep"] == 1.0, "the result of the first was there before the last began"
