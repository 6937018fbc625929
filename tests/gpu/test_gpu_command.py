"""``make gpu`` on a machine without a GPU: its choices, report, and deadlines, with real processes over Gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import __main__ as command
from tests.gpu import running
from tests.gpu.budget import END_SECONDS, Budget
from tests.gpu.bundle import OF_THE_MACHINE, needed
from tests.gpu.check import Check, Outcome
from tests.gpu.checks import CHECKS
from tests.gpu.environment import device_of, environment_of
from tests.gpu.machine import Machine
from tests.gpu.report import lines_of, write_page
from tests.gpu.running import NOT_BEGUN, run_check
from tests.gpu.starting import ROOT, Starter

MACHINE = Machine(("H200", "H200"), "580.1", (2, 29, 7), "2.13.0", "13.0", "3.11.7", "8 CPU cores")


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not prepare the start of ranks, which takes seconds: the test starts none."""
    monkeypatch.setattr(Starter, "prepared", Starter)


def test_ranks_that_share_a_gpu_claim_different_hosts_until_nccl_allows_them_one() -> None:
    old = [environment_of(rank, 2, 1, (2, 29, 7)) for rank in (0, 1)]
    assert [one["NCCL_HOSTID"] for one in old] == ["ks-0", "ks-1"]
    assert all(one["NCCL_P2P_DISABLE"] == "1" and one["NCCL_SOCKET_IFNAME"] == "lo" for one in old)
    new = environment_of(0, 2, 1, (2, 30, 1))
    assert new["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in new


def test_each_rank_has_a_gpu_of_its_own_where_enough_exist() -> None:
    assert [device_of(rank, 2) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert "NCCL_HOSTID" not in environment_of(1, 2, 2, (2, 29, 7))
    assert "NCCL_HOSTID" in environment_of(1, 3, 2, (2, 29, 7))
    assert device_of(1, 0) == "cpu"


@pytest.mark.usefixtures("without_ranks")
def test_without_a_gpu_every_check_is_skipped_by_name(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "why_no_gpu", lambda: "torch finds no CUDA device")
    report, page = tmp_path / "report.json", tmp_path / "gpus.md"
    monkeypatch.setattr(sys, "argv", ["gpu", "--report", str(report), "--page", str(page)])
    assert command.main() == 0
    said = capsys.readouterr().out
    assert "no check runs: torch finds no CUDA device" in said
    found = json.loads(report.read_text())["checks"]
    assert {one["name"] for one in found} == set(CHECKS)
    assert {one["state"] for one in found} == {"skipped"}
    assert all(name in said for name in CHECKS)
    assert not page.exists()


@pytest.mark.usefixtures("without_ranks")
def test_sigterm_ends_the_check_that_runs_and_no_other_begins(tmp_path: Path, monkeypatch, capsys) -> None:
    begun = []

    def run(check: Check, *_: object) -> Outcome:
        if check.sleeps:
            return Outcome(check.name, check.what, "skipped")
        begun.append(check.name)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was ignored")

    monkeypatch.setattr(command, "run_check", run)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--report", str(tmp_path / "report.json")])
    assert command.main() == 130
    assert begun == [next(iter(CHECKS))]
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.usefixtures("without_ranks")
def test_the_time_of_a_run_is_divided_and_a_check_without_time_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    check = CHECKS["collectives"]
    budget = Budget(480.0)
    limited = budget.limited(check, 400.0)
    assert limited is not None
    assert limited.whole_seconds == 480.0 - END_SECONDS - 400.0
    assert budget.limited(check, 480.0 - END_SECONDS) is None
    arguments = [
        "gpu",
        "--device",
        "cpu",
        "--seconds",
        "1",
        "--only",
        "baby",
        "--report",
        str(tmp_path / "report.json"),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == 0
    assert "no time left for it" in capsys.readouterr().out


def test_the_most_important_checks_come_first_and_the_slowest_last() -> None:
    names = list(CHECKS)
    assert names[:5] == ["collectives", "abort_killed", "abort_stopped", "abort_missing", "kill_and_heal"]
    assert names[-1] == "torchtitan"


@pytest.mark.usefixtures("without_ranks")
def test_a_run_that_is_cut_off_leaves_a_report_of_what_it_found(tmp_path: Path, monkeypatch) -> None:
    report, seen = tmp_path / "report.json", []

    def run(check: Check, *_: object) -> Outcome:
        seen.append({one["name"]: one["reason"] for one in json.loads(report.read_text())["checks"]})
        return Outcome(check.name, check.what, "passed", f"it was number {len(seen)}")

    monkeypatch.setattr(command, "run_check", run)
    only = ["--only", "collectives", "abort_killed", "heal"]
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", *only, "--report", str(report)])
    assert command.main() == 0
    assert [list(one.values()) for one in seen] == [
        [NOT_BEGUN] * 3,
        ["it was number 1", *[NOT_BEGUN] * 2],
        ["it was number 1", "it was number 2", NOT_BEGUN],
    ]


@pytest.mark.usefixtures("without_ranks")
def test_a_check_that_sleeps_runs_beside_the_others(tmp_path: Path, monkeypatch) -> None:
    others_end = threading.Event()

    def run(check: Check, *_: object) -> Outcome:
        if check.sleeps:
            assert others_end.wait(60)
        elif check.name == "fork":
            others_end.set()
        return Outcome(check.name, check.what, "passed")

    monkeypatch.setattr(command, "run_check", run)
    only = ["--only", "collectives", "fork", "watchdog"]
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", *only, "--report", str(tmp_path / "report.json")])
    assert command.main() == 0


def test_a_check_ends_with_the_time_of_the_run(tmp_path: Path, monkeypatch) -> None:
    check = Check("x", "y", lambda _rank: None, whole_seconds=0.0)
    outcome = outcome_of([None, None], tmp_path, monkeypatch, check)
    assert (outcome.state, outcome.reason) == ("skipped", "no time left for it")


def test_a_page_names_the_machine_each_check_and_the_reasons_of_failures(tmp_path: Path) -> None:
    outcomes = [
        Outcome("a", "It works.", "passed", "", 1.5, {"freed, s": 0.2}),
        Outcome("b", "It fails.", "failed", "rank 0 ended with SIGKILL:\nno output", 2.0),
    ]
    (tmp_path / "gpus.md").write_text("# Checks\nText.\n\n## Figures\nOf an older run.\n")
    write_page(tmp_path / "gpus.md", MACHINE, outcomes)
    page = (tmp_path / "gpus.md").read_text()
    assert page.startswith("# Checks\nText.\n\n## Figures\n`make gpu` wrote this part on")
    assert "older run" not in page
    assert "| GPUs | 2 x H200 |" in page
    assert "| NCCL | 2.29.7 |" in page
    assert "| `a` | It works. | passed | freed, s: 0.2 |" in page
    assert "* `b`: rank 0 ended with SIGKILL:" in page
    assert [line.split()[:2] for line in lines_of(outcomes)][:2] == [["a", "passed"], ["b", "failed"]]


@pytest.mark.training
def test_checks_run_on_the_cpu_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    starter = Starter.prepared()
    assert starter.forks, "an import of the checks starts a thread"
    outcome = run_check(CHECKS["abort_stopped"], 0, None, tmp_path, starter)
    starter.close()
    assert (outcome.state, outcome.reason) == ("passed", "")
    assert outcome.figures["freed, s"] < 1
    late = replace(CHECKS["abort_stopped"], seconds=0.0, lost=frozenset())  # the stopped rank sends no result
    outcome = run_check(late, 0, None, tmp_path)
    assert outcome.state == "failed"
    assert outcome.reason.startswith("not over within 0 s")
    assert "Current thread" in outcome.reason, "the stacks of a late rank"


FORKING = """
import sys
from pathlib import Path
from tests.gpu.checks import CHECKS
from tests.gpu.running import run_check
from tests.gpu.starting import Forked, Starter
starter = Starter.prepared()
print(run_check(CHECKS["collectives"], 0, None, Path(sys.argv[1]), starter).state, isinstance(starter._process, Forked))
starter.close()
"""


@pytest.mark.training
def test_a_runner_without_threads_is_forked_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # as make gpu sets it
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["passed True"], done.stdout + done.stderr


def test_a_check_that_needs_a_gpu_is_skipped_with_its_reason(tmp_path: Path) -> None:
    outcome = run_check(CHECKS["streams"], 0, None, tmp_path)
    assert (outcome.state, outcome.reason) == ("skipped", "a CPU has no streams")


class Ended:
    """A rank that has ended with ``code``; None: it runs."""

    pid = 0

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def wait(self, _seconds: float) -> int | None:
        return self.code


ANY = Check("x", "y", lambda _rank: None)


def outcome_of(
    codes: list[int] | list[None], folder: Path, monkeypatch: pytest.MonkeyPatch, check: Check = ANY
) -> Outcome:
    def start(ranks: running._Ranks, index: int) -> None:
        ranks._processes[index] = Ended(codes[index])  # type: ignore[assignment]
        ranks._result_of(index).write_text(json.dumps({"digest": str(index)}))
        ranks._log_of(index).write_text("no memory\n")

    monkeypatch.setattr(running._Ranks, "start", start)
    monkeypatch.setattr(os, "killpg", lambda _group, number: number == signal.SIGKILL)
    return run_check(check, 0, None, folder)


def test_different_weights_fail_a_check(tmp_path: Path, monkeypatch) -> None:
    outcome = outcome_of([0, 0], tmp_path, monkeypatch)
    assert outcome.state == "failed"
    assert "different weights: {0: '0', 1: '1'}" in outcome.reason


@pytest.mark.parametrize(
    ("code", "sentence"), [(-9, "rank 1 ended with SIGKILL"), (1, "rank 1 ended with exit code 1")]
)
def test_a_rank_that_ends_early_fails_a_check_with_its_last_output(code, sentence, tmp_path: Path, monkeypatch) -> None:
    outcome = outcome_of([0, code], tmp_path, monkeypatch)
    assert (outcome.state, outcome.reason) == ("failed", f"{sentence}:\nno memory")


def test_a_bundle_has_what_keepstep_needs_and_leaves_pytorch_to_the_machine() -> None:
    found = {line.partition("==")[0] for line in needed("keepstep", ("train", "services"))}
    assert {"aiohttp", "yarl", "multidict", "etcd3", "tenacity", "xxhash"} <= found
    assert not found & (OF_THE_MACHINE | {"pytest", "triton", "scikit-learn"})
