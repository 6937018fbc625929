"""The goodput of the documentation is that of its computation, and the benchmark counts and simulates correctly."""

from __future__ import annotations

import json
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCALING = runpy.run_path(str(ROOT / "docs" / "scaling.py"))


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield __import__("goodput_model")
    del sys.modules["goodput_model"]


def test_the_tables_of_the_page_are_as_computed_now():
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert SCALING["written"](page) == page, "run `python docs/scaling.py`"
    assert SCALING["by_size"]() in page
    assert SCALING["beside_published"]() in page


def test_a_job_without_groups_to_spare_loses_what_is_missing():
    loss = SCALING["Loss"](waiting=10.0, missing=30.0)
    assert loss.goodput(mean=90.0, groups=1) == pytest.approx(0.9 * 2 / 3)
    assert loss.goodput(mean=1.0, groups=1) == 0.0


def test_the_measured_constants_of_the_page_are_on_it_or_in_the_results():
    text = (ROOT / "docs" / "scaling.md").read_text()
    for figure in ("7.9 GB/s", "0.62 s after a loss and 0.17 s after a join"):
        assert figure in " ".join(text.split())
    kills = json.loads((ROOT / "benchmarks" / "measured.json").read_text())["kill"]["figures"]
    measured = {one["name"]: one["keepstep"] for one in kills}
    assert SCALING["PAUSE"] >= measured["SIGKILL to next commit"]
    assert SCALING["HANG"] == pytest.approx(measured["SIGSTOP to next commit"], abs=0.1)


def test_kills_fill_the_window_with_the_number_that_its_mean_time_gives(model):
    plan = model.kills(10.0, 100.0, seed=1)
    assert len(plan) == 10
    assert all(0 < before.time < after.time < 100 for before, after in pairwise(plan))
    assert plan == model.kills(10.0, 100.0, seed=1) != model.kills(10.0, 100.0, seed=2)
    assert {one.group for one in plan} == {0, 1, 2}


def test_a_step_that_is_taken_again_counts_once_and_one_that_is_lost_not_at_all(model):
    lost_and_taken_again = [(1, 1), (2, 2), (3, 3), (9, 2), (10, 3)]
    found = model.kept([model.Commit(time, step, 3) for time, step in lost_and_taken_again])
    assert [(one.time, one.step) for one in found] == [(1, 1), (9, 2), (10, 3)]
    gone_back = model.kept([model.Commit(time, step, 3) for time, step in [(1, 7), (2, 1)]])
    assert [one.step for one in gone_back] == [1]


def test_each_step_counts_once_with_the_share_of_its_groups(model):
    commits = [model.Commit(float(at) + late, at, 2 if at == 3 else 3) for at in range(6) for late in (0.0, 0.01)]
    found = model.kept(commits)
    assert len(found) == 6
    assert model.useful(found, 0.01, 5.01) == pytest.approx(4 + 2 / 3)
    assert model.useful(found, 0.01, 0.51) == pytest.approx(0.5)
    assert model.useful(found, 4.01, 60.0) == pytest.approx(1.0)


def test_the_cost_of_a_kill_is_the_added_time_and_the_way_back(model):
    commits = [model.Commit(time, step, 3) for step, time in enumerate([0.0, 1.0, 2.5, 3.5, 4.7], 1)]
    cost = model.cost(commits, killed=1.2, back=4.7, step=1.0)
    assert cost == model.Cost(pause=pytest.approx(0.7), away=pytest.approx(2.5))
    assert model.cost(commits, killed=-1.0, back=0.5, step=1.0) is None


def test_simulated_replicas_lose_what_the_costs_say(model):
    assert model.of_replicas([model.Cost(0.0, 0.0)], 1.0, 1e9, 1000.0) == 1.0
    rare = model.of_replicas([model.Cost(2.0, 10.0)], 1.0, 1000.0, 1e6)
    # 2 s of all groups; one of three is away for 10 s, and for what is left of the step of the kill and of its return
    assert 1 - rare == pytest.approx((2.0 + (10.0 + 1.0) / 3) / 1000, rel=0.15)
    alone = model.of_replicas([model.Cost(0.0, 50.0)], 1.0, 10.0, 1e5)
    assert 0.05 < alone < 0.6


def test_simulated_restarts_lose_the_restart_and_the_steps_since_the_checkpoint(model):
    assert model.of_restarts([5.0], 1.0, 0.1, 10, 1e9, 1000.0) == pytest.approx(1.0, rel=1e-3)
    rare = model.of_restarts([5.0], 1.0, 0.0, 10, 1000.0, 1e6)
    assert 1 - rare == pytest.approx((5.0 + 5.0) / 1000, rel=0.15)  # half of the steps between two checkpoints


def test_the_steps_between_two_checkpoints_lose_least(model):
    best = model.best_every(save=0.5, step=1.0, mean=100.0)
    assert best == 10
    goodputs = {
        every: model.of_restarts([5.0], 1.0, 0.5, every, 100.0, 2e5) / (1 + 0.5 / every) for every in (2, best, 40)
    }
    assert max(goodputs, key=goodputs.get) == best
    assert model.best_every(save=1e-9, step=1.0, mean=1.0) == 1
