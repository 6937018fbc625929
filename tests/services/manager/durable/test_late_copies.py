"""Checkpoints whose state is copied beside the step that follows it: right whenever the copy runs, or refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import Manager
from keepstep.state.early_copy import LateCopy
from tests.services.manager.groups import manager
from tests.support.checkpoints.checkpoint_ends import eventually
from tests.support.services.relay_driver import relay_process

BIG = 300_000
"""Elements; enough to be copied late."""
DELAY_SECONDS = 0.3


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Delay the thread of late copies, so that a script that did not wait would change what is copied.

    Returns the number of tensors of each late copy.
    """
    counts: list[int] = []
    run = LateCopy.run

    def later(copy: LateCopy) -> None:
        counts.append(len(copy._late))
        over = threading.Event()
        threading.Timer(DELAY_SECONDS, over.set).start()
        over.wait()
        run(copy)

    monkeypatch.setattr(LateCopy, "run", later)
    return counts


def state() -> dict[str, Any]:
    return {"w": torch.zeros(BIG), "mean": torch.zeros(BIG), "small": torch.zeros(3)}


def commit(one: Manager, held: dict[str, Any], *, in_pass: Callable[[], object] = lambda: None) -> None:
    """One step, whose change adds 1 to all that an optimizer changes."""
    one.start_quorum()
    in_pass()
    gradient = torch.ones(3)
    one.allreduce(gradient).wait()
    assert one.should_commit()
    held["w"] += 1
    held["small"] += 1


def resumed(lighthouse: str, url: str) -> tuple[int, dict[str, Any]]:
    """Return the step and the state that another process of the job resumes from."""
    held = state()
    with manager(lighthouse, "b", held, durable_relays=url, durable_every=1, init_sync=False) as one:
        assert one.resume()
        return one.current_step(), held


def train(lighthouse: str, url: str, work: Callable[[Manager, dict[str, Any]], None]) -> None:
    held = state()
    with manager(lighthouse, "a", held, durable_relays=url, durable_every=1, init_sync=False) as one:
        work(one, held)


async def test_the_state_that_is_written_is_that_of_its_step_although_the_next_step_has_begun(
    lighthouse: str, tmp_path: Path, delayed: list[int]
) -> None:
    def work(one: Manager, held: dict[str, Any]) -> None:
        for _ in range(4):
            commit(one, held, in_pass=lambda: held["mean"].add_(1))
            assert one.last_checkpoint.error == ""
        one.start_quorum()
        eventually(lambda: one.last_checkpoint.step == 4)

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        await asyncio.to_thread(train, lighthouse, url, work)
        step, held = await asyncio.to_thread(resumed, lighthouse, url)
    assert step == 4
    assert held["w"].eq(4).all()
    assert held["mean"].eq(4).all()
    assert held["small"].eq(4).all()
    assert delayed == [1, 1, 1], "the weight; the pass writes to the mean"


async def test_an_optimizer_that_steps_before_the_commit_waits_for_the_copy(
    lighthouse: str, tmp_path: Path, delayed: list[int]
) -> None:
    def work(one: Manager, held: dict[str, Any]) -> None:
        for _ in range(3):
            commit(one, held)
        eventually(lambda: one.last_checkpoint.step == 2)
        parameter = torch.nn.Parameter(held["w"])
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        one.start_quorum()
        parameter.grad = torch.ones(BIG)
        optimizer.step()
        eventually(lambda: one.last_checkpoint.step == 3)
        assert one.last_checkpoint.error == ""

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        await asyncio.to_thread(train, lighthouse, url, work)
        step, held = await asyncio.to_thread(resumed, lighthouse, url)
    assert step == 3
    assert held["w"].eq(3).all()
    assert delayed[-1] == 2


async def test_a_pass_that_begins_to_write_costs_one_checkpoint_and_no_later_one(
    lighthouse: str, tmp_path: Path, delayed: list[int]
) -> None:
    def work(one: Manager, held: dict[str, Any]) -> None:
        for _ in range(3):
            commit(one, held)
        eventually(lambda: one.last_checkpoint.step == 2)
        commit(one, held, in_pass=lambda: held["mean"].data.add_(1))
        eventually(lambda: one.last_checkpoint.error_step == 3)
        assert "1 tensors of the state changed while they were copied" in one.last_checkpoint.error
        commit(one, held, in_pass=lambda: held["mean"].data.add_(1))
        eventually(lambda: one.last_checkpoint.step == 4)
        assert one.last_checkpoint.error == ""

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        await asyncio.to_thread(train, lighthouse, url, work)
        step, held = await asyncio.to_thread(resumed, lighthouse, url)
    assert (step, held["w"][0].item(), held["mean"][0].item()) in {(4, 4.0, 1.0), (5, 5.0, 2.0)}
    assert delayed == [2, 2, 1]
