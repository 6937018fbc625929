"""`keepstep chaos` against a real `keepstep run`: what it shows, refuses, hits, and reports."""

from __future__ import annotations

import json
import re

import pytest

from tests.services.cli.scene import keepstep
from tests.support.jobs.job import TRAINER
from tests.support.processes.forked import FORKS
from tests.support.services.command import Command

DEADLINE = 60.0
KINDS = ("--only", "kill", "--only", "freeze", "--only", "slow", "--only", "policy", "--only", "verify")


@pytest.mark.training
@pytest.mark.timeout(300)  # six processes that import torch, beside others
async def test_chaos_hits_a_running_job_and_reports_what_it_cost(tmp_path):
    """Starts trainers, once for all: targets are shown, a dry run hits nothing, and a run recovers from its faults."""
    logs, job = tmp_path / "logs", ("--job", tmp_path.name)
    logs.mkdir()
    words = ("run", "--replicas", "3", "--state-dir", str(logs), *job, "--", str(TRAINER))
    variables = {FORKS: "1", "KEEPSTEP_STEP_LOG": str(logs / "steps.jsonl"), "TRAINER_PACE": "0.01"}
    run = Command(tmp_path, *words, deadline=DEADLINE, **variables)
    try:
        at = ("--lighthouse", run.wait_for(r"ask it with `keepstep status --lighthouse (\S+)`")[1])
        run.wait_for('"committed".*"step": 5,', times=3)
        chaos = ("chaos", *at, *job, "--logs", str(logs), "--longest", "500ms", "--mean-seconds-between", "300ms")

        refused = await keepstep(*chaos, "--only", "cut", "--dry-run")
        assert refused.code == 2, refused
        assert "--only cut: r0: " in refused.err

        shown = await keepstep(*chaos, *KINDS, "--seed", "3", "--dry-run")
        assert shown.code == 0, shown
        assert "lighthouse 127.0.0.1:" not in shown.out, "the only lighthouse must not be hit"
        assert re.search(r"\d+ freeze r[0-2] for 0\.\d+ s", shown.out)

        results = tmp_path / "results"
        done = await keepstep(*chaos, *KINDS, "--seconds", "2", "--yes", "--json", "--results", str(results))
        assert done.code == 0, done
        report = json.loads(done.out)
        assert report == json.loads((results / "results.json").read_text())
        assert report["faults"] >= 2, report
        assert report["not_injected"] == 0, report
        assert report["commits"] >= 2, report
        assert report["checked_steps"] >= 5, report
        assert report["false_evictions"] == 0, report
        assert {one["kind"] for one in report["each"]} <= set(KINDS)
        hit = [one for one in report["each"] if one["role"] == "group"]
        assert hit
        assert all(one["next_commit_seconds"] > 0 < one["recovered_seconds"] for one in hit), report

        wedged = await keepstep(*chaos, *KINDS, "--wedge", "0.01ms", "--yes", "--results", str(results))
        assert wedged.code == 7, wedged
        assert "is wedged" in wedged.err
        assert "reason" in json.loads((results / "wedge-quorum.json").read_text())
        assert "keepstep" in (results / "wedge-processes.txt").read_text()
    finally:
        run.close()
