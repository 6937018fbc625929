"""``start_quorum`` twice: a step in which nothing happened yet goes on, any other is discarded."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Optimizer
from tests.services.manager.groups import SECOND, events, manager, place_to_meet, together

DEADLINE = 60


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_zero_grad_at_the_start_and_at_the_end_of_a_loop_costs_no_step(lighthouse, steps: Path, sync):
    model = nn.Linear(3, 1)
    with manager(lighthouse, "a", use_async_quorum=not sync) as m:
        ddp = DistributedDataParallel(m, model)
        optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=0.1))
        quorums = []
        for _ in range(5):
            optimizer.zero_grad()
            ddp(torch.ones(1, 3)).sum().backward()
            assert optimizer.step()
            quorums.append(m.state_dict()["lineage"])
            optimizer.zero_grad()
        assert m.current_step() == 5
    assert len(set(quorums)) == 1, "the process group was built once"
    assert "discarded" not in events(steps)


@pytest.mark.parametrize(
    "second",
    [{"shrink_only": True}, {"allow_heal": False}, {"timeout": 5 * SECOND}],
    ids=["shrink_only", "allow_heal", "timeout"],
)
def test_other_arguments_begin_another_step(lighthouse, steps: Path, second):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        m.start_quorum(**second)
        assert m.should_commit()
    assert events(steps).count("discarded") == 1


def test_a_step_that_is_cancelled_is_neither_committed_nor_discarded(lighthouse, steps: Path):
    with manager(lighthouse, "a") as m:
        m.steps.cancel()
        for _ in range(3):
            m.start_quorum()
            m.wait_quorum()
            m.steps.cancel()
        with pytest.raises(RuntimeError, match="no step has begun"):
            m.should_commit()
        m.start_quorum()
        m.allreduce(torch.ones(1)).wait()
        m.steps.cancel()
        assert m.should_commit(), "a step in which something was reduced goes on"
        assert m.current_step() == 1
    assert "discarded" not in events(steps)
    quorums = {line["quorum_id"] for line in map(json.loads, steps.read_text().splitlines()) if line["quorum_id"]}
    assert len(quorums) == 1, "the process group was built once"


@pytest.mark.parametrize("what", ["reduced", "failed", "loaded", "layout"])
def test_a_step_in_which_something_happened_is_discarded(lighthouse, steps: Path, what):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        if what == "reduced":
            m.allreduce(torch.ones(1)).wait()
        elif what == "failed":
            m.report_error(RuntimeError("out of memory"))
        elif what == "loaded":
            m.load_state_dict({"step": 7, "batches_committed": 7})
        else:
            DistributedDataParallel(m, nn.Linear(2, 1))
        m.start_quorum()
        assert m.errored() is None
        assert m.should_commit()
        assert m.current_step() == (8 if what == "loaded" else 1)
    assert events(steps).count("discarded") == 1


def test_a_step_that_lost_a_member_is_not_continued(lighthouse):
    ready, both, gone = threading.Barrier(2), threading.Barrier(2), threading.Event()

    def survivor() -> tuple[bool, int]:
        with manager(lighthouse, "a") as m:
            ready.wait(DEADLINE)
            m.start_quorum()
            m.wait_quorum()
            both.wait(DEADLINE)
            assert gone.wait(DEADLINE)
            while not m._context.reconfigurer.broken:
                time.sleep(0.01)  # until the news of the loss is here
            m.start_quorum()
            assert m.allreduce(torch.ones(1)).wait()
            return m.should_commit(), m.num_participants()

    def leaver() -> None:
        with manager(lighthouse, "b") as m:
            ready.wait(DEADLINE)
            m.start_quorum()
            m.wait_quorum()
            both.wait(DEADLINE)
        gone.set()  # in the middle of the step: lost

    assert together(survivor, leaver)[0] == (True, 1)


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_a_group_that_heals_and_its_source_continue_their_step(lighthouse, steps: Path, sync):
    ahead, over = threading.Event(), threading.Event()

    def step(m: Any) -> bool:
        m.start_quorum()
        m.start_quorum()
        m.allreduce(torch.ones(1)).wait()
        return bool(m.should_commit())

    def veteran() -> None:
        with manager(lighthouse, "a", {"w": torch.full((2,), 7.0)}, use_async_quorum=not sync) as m:
            while not over.is_set():
                step(m)
                if m.current_step() == 3:
                    ahead.set()

    def joiner() -> tuple[list[bool], list[float]]:
        state = {"w": torch.zeros(2)}
        assert ahead.wait(DEADLINE)
        with manager(lighthouse, "b", state, use_async_quorum=not sync) as m:
            committed = [step(m) for _ in range(2)]
            over.set()
            return committed, state["w"].tolist()

    assert together(veteran, joiner)[1] == ([True, True], [7.0, 7.0])
    assert events(steps).count("healed") == 1


def test_when_one_rank_continues_and_another_discards_the_group_loses_that_step_and_goes_on(lighthouse, steps: Path):
    place = place_to_meet()
    answered, voted = threading.Barrier(2), threading.Event()

    def rank(number: int) -> list[bool]:
        with manager(lighthouse, "g", rank=number, **place) as m:
            m.start_quorum()
            m.wait_quorum()
            answered.wait(DEADLINE)
            committed = []
            if number == 0:  # discards, and asks for the next while rank 1 is still in this one
                m.allreduce(torch.ones(1)).wait()
                m.start_quorum()
                assert voted.wait(DEADLINE)
            else:
                m.start_quorum()
                committed.append(m.should_commit())
                voted.set()
                m.start_quorum()
            committed.append(m.should_commit())
            return committed

    assert together(lambda: rank(0), lambda: rank(1)) == [[True], [False, True]]
