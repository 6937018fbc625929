"""Copies that go on beside a step: of what no pass writes to, and torn where one does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from keepstep.state import early_copy
from keepstep.state.early_copy import Unwritten
from keepstep.state.staging import StagingArea
from keepstep.state.state_bytes import save_state

BIG = 300_000
"""Elements; more than ``MIN_BYTES`` of float32."""


@pytest.fixture
def area() -> Iterator[StagingArea]:
    area = StagingArea(lambda _: None)
    yield area
    area.close()


@pytest.fixture
def late(monkeypatch) -> list[int]:
    """The number of tensors that each copy left to its thread."""
    counts: list[int] = []
    begin = early_copy.LateCopy.__init__

    def count(self, layout, pack, watched, regions) -> None:
        counts.append(len(regions))
        begin(self, layout, pack, watched, regions)

    monkeypatch.setattr(early_copy.LateCopy, "__init__", count)
    return counts


@pytest.fixture
def held(monkeypatch):
    """Late copies wait until the test says so."""
    go, run = threading.Event(), early_copy.LateCopy.run

    def wait(self) -> None:
        assert go.wait(60)
        run(self)

    monkeypatch.setattr(early_copy.LateCopy, "run", wait)
    yield go
    go.set()


def test_what_no_pass_wrote_to_is_copied_late_from_the_second_time_on(area, late):
    state = {"weight": torch.ones(BIG), "mean": torch.zeros(BIG), "small": torch.ones(5), "text": "x"}
    for step in range(4):
        expected = bytes(save_state(state)[1])
        snapshot = area.stage(step, state, late=True)
        state["mean"].add_(1)  # in the pass
        area.settle()
        state["weight"].mul_(2)  # the optimizer
        state["small"].add_(1)
        assert snapshot.torn() == ""
        assert bytes(snapshot.pack) == expected
    assert late == [0, 1, 1, 1]


@pytest.mark.parametrize("how", ["counted", "data", "numpy"])
def test_a_late_copy_of_what_a_pass_writes_to_says_so_and_the_next_one_is_made_before_the_pass(area, late, held, how):
    state = {"weight": torch.ones(BIG), "other": torch.ones(BIG)}
    area.stage(1, state, late=True)
    area.settle()
    snapshot = area.stage(2, state, late=True)
    written = {"counted": state["weight"], "data": state["weight"].data, "numpy": state["weight"].numpy()}[how]
    written *= 2  # before the thread copies it
    held.set()
    area.settle()
    assert "1 tensors of the state changed" in snapshot.torn()
    for step in (3, 4):
        expected = bytes(save_state(state)[1])
        snapshot = area.stage(step, state, late=True)
        state["weight"].mul_(3)
        area.settle()
        assert snapshot.torn() == ""
        assert bytes(snapshot.pack) == expected
    assert late == [0, 2, 1, 1]


def test_settle_waits_for_the_copy(area, held):
    state = {"weight": torch.ones(BIG)}
    area.stage(1, state, late=True)
    area.settle()
    snapshot = area.stage(2, state, late=True)
    threading.Timer(0.2, held.set).start()
    area.settle()
    assert held.is_set()
    state["weight"].zero_()
    assert snapshot.torn() == ""
    assert torch.frombuffer(snapshot.pack, dtype=torch.float32).eq(1).all()


def test_a_tensor_that_is_replaced_is_copied_at_once_again(area, late):
    state = {"weight": torch.ones(BIG)}
    for step in range(2):
        area.stage(step, state, late=True)
        area.settle()
    old = state["weight"]
    state["weight"] = torch.full((BIG,), 5.0)
    snapshot = area.stage(2, state, late=True)
    area.settle()
    assert late == [0, 1, 0]
    assert torch.frombuffer(snapshot.pack, dtype=torch.float32).eq(5).all()
    assert old.eq(1).all()


def test_shared_and_strided_tensors_are_copied_at_once(area, late):
    whole = torch.ones(2 * BIG)
    state = {"whole": whole, "part": whole[BIG:], "gaps": torch.ones(BIG, 2)[:, 0], "array": torch.ones(BIG).numpy()}
    for step in range(3):
        area.stage(step, state, late=True)
        area.settle()
    assert late == [0, 0, 0]


def test_other_stages_settle_a_late_copy_and_leave_none(area, late):
    state = {"weight": torch.ones(BIG)}
    for step in range(2):
        area.stage(step, state, late=True)
    snapshot = area.stage(2, state)
    state["weight"].zero_()
    assert snapshot.torn() == ""
    assert torch.frombuffer(snapshot.pack, dtype=torch.float32).eq(1).all()
    assert late == [0, 1]


def test_the_steps_of_optimizers_are_writes_only_after_settle(area, late):
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        snapshot = area.stage(step, state, late=True)
        model(torch.ones(4, 1000)).sum().backward()
        area.settle()
        expected = bytes(save_state(state)[1])
        optimizer.step()
        assert snapshot.torn() == ""
        assert bytes(snapshot.pack) == expected
    assert late == [0, 1, 3, 3], "the weight; after the second step also its two moments"


def test_an_object_that_copies_nothing_settles_and_closes_without_a_thread():
    before = set(threading.enumerate())
    unwritten = Unwritten()
    unwritten.settle()
    unwritten.close()
    assert set(threading.enumerate()) <= before
