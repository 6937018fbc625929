"""A NaN or an infinity in one group: who is named, and which steps commit."""

from __future__ import annotations

import json
import math
import threading
import urllib.request
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from keepstep.step.reducing.collectives import _any_nonfinite, _extremes
from tests.services.manager.groups import manager, together


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_one_element_that_is_not_finite_is_found_in_any_dtype(dtype):
    tensor = torch.zeros(1001, dtype=dtype)
    tensor[0], tensor[1] = 6e4, -6e4  # all elements are finite, but the sum of a float16 tensor of them overflows
    tensor[2:] = 6e4
    assert not _any_nonfinite([*_extremes(tensor)])
    for bad in (math.nan, math.inf, -math.inf):
        broken = tensor.clone()
        broken[37] = bad
        assert _any_nonfinite([*_extremes(broken)]), bad
    assert not _any_nonfinite([*_extremes(tensor[:0])])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_group_with_a_nan_is_named_for_an_average_in_any_dtype(lighthouse, dtype):
    ready = threading.Barrier(2)

    def group(name: str) -> list[Any]:
        with manager(lighthouse, name, min_replica_size=2) as m:
            ready.wait(30)
            m.start_quorum()
            good, bad, none = torch.full((7,), 3.0, dtype=dtype), torch.ones(3, dtype=dtype), torch.ones(0, dtype=dtype)
            bad[1] = math.nan if name == "b" else 1.0
            for one in (good, bad, none):
                m.allreduce(one)
            m.allreduce(transposed := torch.arange(6, dtype=dtype).view(2, 3).T)
            assert m.should_commit()
            assert good.tolist() == [3.0] * 7
            assert bad[0] == 1.0
            assert bad[1].isnan()
            assert transposed.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
            return [m.steps.attempt.present.nonfinite]

    assert together(lambda: group("a"), lambda: group("b")) == [[False], [True]]


def two_groups(lighthouse: str, bad: dict[tuple[str, int], float], steps: int, **options: Any) -> list[list[bool]]:
    """Train ``steps`` attempts. ``bad``: contributions that are not 1, by group and attempt. Return what committed."""
    ready = threading.Barrier(2)

    def group(name: str) -> list[bool]:
        committed = []
        with manager(lighthouse, name, min_replica_size=2, **options) as m:
            for attempt in range(steps):
                ready.wait(30)
                m.start_quorum()
                m.allreduce(torch.tensor([1.0, bad.get((name, attempt), 1.0)]))
                m.allreduce(torch.tensor([-math.inf]), reduce_op=ReduceOp.MAX)  # its neutral element, and no NaN
                committed.append(m.should_commit())
                if not committed[-1]:
                    who = "this group" if (name, attempt) in bad else "another group"
                    assert f"NaN or an infinity: {who}" in str(m.errored())
            ready.wait(30)
            m.start_quorum()  # carries the report of the last step
        return committed

    return together(lambda: group("a"), lambda: group("b"))


def events(lighthouse: str) -> list[tuple[str, int, bool]]:
    with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default/events", timeout=30) as answer:
        found = [one for one in json.load(answer)["events"] if one["kind"] == "nonfinite"]
    return [(one["replica_id"][:1], one["detail"]["step"], one["detail"]["committed"]) for one in found]


def test_a_group_that_contributes_a_nan_is_named_and_the_step_commits(lighthouse):
    assert two_groups(lighthouse, {("b", 1): math.nan}, 3) == [[True] * 3] * 2
    assert events(lighthouse) == [("b", 2, True)]


def test_a_job_that_refuses_nonfinite_averages_repeats_the_step_in_all_groups(lighthouse):
    bad = {("b", 1): math.inf, ("b", 2): math.nan}
    assert two_groups(lighthouse, bad, 4, refuse_nonfinite=True) == [[True, False, False, True]] * 2
    assert events(lighthouse) == [("b", 1, False)]


def test_refused_steps_count_for_max_retries(lighthouse):
    with manager(lighthouse, "a", refuse_nonfinite=True, max_retries=1) as m:
        for last in (False, True):
            m.start_quorum()
            m.allreduce(torch.tensor([math.nan]))
            if not last:
                assert not m.should_commit()
        with pytest.raises(RuntimeError, match=r"2 steps in a row failed.*this group contributed it"):
            m.should_commit()
