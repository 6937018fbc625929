"""`keepstep chaos` against a real `keepstep run`: what it shows, refuses, hits, and reports."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.services.cli.scene import keepstep
from tests.support.jobs.job import TRAINER
from tests.support.processes.forked import FORKS
from tests.support.services.command import Command

DEADLINE = 60.0
ONE_COPY = str(Path(__file__).parents[4] / "examples" / "one_copy.py")
KINDS = [f"--only={kind}" for kind in ("kill", "freeze", "slow", "policy", "verify", "exception", "gil", "clock")]


@pytest.mark.training
@pytest.mark.timeout(300)  # six processes that import torch, beside others
async def test_chaos_hits_a_running_job_and_reports_what_it_cost(tmp_path):
    """Starts trainers, once for all: targets are shown, a dry run hits nothing, and a run recovers from its faults."""
    logs, job = tmp_path / "logs", ("--job", tmp_path.name)
    logs.mkdir()
    words = ("run", "--replicas", "3", "--state-dir", str(logs), *job, "--", str(TRAINER))
    variables = {FORKS: "1", "KEEPSTEP_STEP_LOG": str(logs / "steps.jsonl"), "TRAINER_PACE": "0.01"}
    variables["KEEPSTEP_CHAOS"] = str(tmp_path / "s")
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
        assert not re.search("(kill|freeze|slow|gil) lighthouse", shown.out), "the only one stays up"
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
        assert {f"--only={one['kind']}" for one in report["each"]} <= set(KINDS)
        assert 0 < report["goodput"] <= 1, report
        assert report["longest_commit_gap_seconds"] > 0, report
        assert "No promise was broken" in (results / "results.md").read_text()
        hit = [one for one in report["each"] if one["role"] == "group" and one["kind"] != "clock"]  # it takes none away
        assert hit
        assert all(one["next_commit_seconds"] > 0 < one["recovered_seconds"] for one in hit), report

        inside = ("--only", "nan", "--only", "exception", "--faults", "2", "--seconds", "0", "--seed", "3")
        done = await keepstep(*chaos, *inside, "--yes", "--json", "--results", str(results))
        assert done.code == 0, done
        report = json.loads(done.out)
        assert {one["kind"] for one in report["each"]} == {"nan", "exception"}, report
        assert report["not_injected"] == 0, report

        template = f"sh -c 'set -- {{command}}; shift; exec {sys.executable} -m keepstep_cli \"$@\"'"
        refused = await keepstep(*chaos, "--exec", template, "--only", "restart", "--dry-run")
        assert refused.code == 2, refused
        assert "no template reaches it; pass --exec 'restart=COMMAND'" in refused.err
        reached = ("--exec", template, "--only", "freeze", "--target", "r1", "--seconds", "0", "--faults", "1")
        done = await keepstep(*chaos, *reached, "--yes", "--json", "--results", str(results))
        assert done.code == 0, done
        (one,) = json.loads(done.out)["each"]
        assert (one["target"], one["failed"]) == ("r1", ""), one
        assert one["recovered_seconds"] > one["seconds"] > 0, one

        wedged = await keepstep(*chaos, *KINDS, "--wedge", "0.01ms", "--yes", "--results", str(results))
        assert wedged.code == 7, wedged
        assert "is wedged" in wedged.err
        assert "reason" in json.loads((results / "wedge-quorum.json").read_text())
        assert "keepstep" in (results / "wedge-processes.txt").read_text()
    finally:
        run.close()


@pytest.mark.training
@pytest.mark.timeout(300)
async def test_chaos_hits_members_of_a_model_that_exists_once_one_after_the_other(tmp_path):
    """Starts trainers: no committed step is lost, and faults inside a process hit its steps too."""
    logs, job = tmp_path / "logs", ("--job", tmp_path.name)
    logs.mkdir()
    words = ("run", "--replicas", "3", "--min-replicas", "2", "--max-restart-pause", "500ms")
    variables = {FORKS: "1", "KEEPSTEP_STEP_LOG": str(logs / "steps.jsonl"), "KEEPSTEP_CHAOS": str(tmp_path / "s")}
    variables |= {"STEPS": "1000000", "PAUSE": "0.02", "EVERY": "5"}
    run = Command(tmp_path, *words, "--state-dir", str(logs), *job, "--", ONE_COPY, deadline=DEADLINE, **variables)
    try:
        at = ("--lighthouse", run.wait_for(r"ask it with `keepstep status --lighthouse (\S+)`")[1])
        run.wait_for("step 5 loss", times=3)
        chaos = ("chaos", *at, *job, "--logs", str(logs), "--mean-seconds-between", "300ms", "--at-most", "3")
        refused = await keepstep(*chaos, "--only", "verify", "--dry-run")
        assert refused.code == 2, refused
        assert "--only verify: the model exists once" in refused.err
        for kind in ("kill", "exception", "nan"):
            once = ("--only", kind, "--faults", "1", "--seconds", "0", "--results", str(tmp_path / kind))
            done = await keepstep(*chaos, *once, "--yes", "--json")
            assert done.code == 0, done
            report = json.loads(done.out)
            assert (report["faults"], report["not_injected"]) == (1, 0), report
            assert (report["lost_steps"], report["violations"], report["broken"]) == (0, [], []), report
    finally:
        run.close()
