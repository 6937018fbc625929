"""Durable checkpoints of jobs that go back to an earlier step in their loop, as after a loss that exploded."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import Manager
from tests.services.manager.durable.test_durable_checkpoints import listed, run, step
from tests.services.manager.groups import manager
from tests.support.services.relay_driver import relay_process


def state() -> dict[str, Any]:
    return {"w": torch.zeros(1000)}


def train(one: Manager, held: dict[str, Any], until: int) -> dict[str, Any]:
    """Train until a step, and return a copy of the state before the last one."""
    saved: dict[str, Any] = {}
    while one.current_step() < until:
        saved = {"manager": one.state_dict(), "w": held["w"].clone()}
        step(one, held)  # the first one does not commit if the other group is late
    return saved


def go_back(one: Manager, held: dict[str, Any], saved: dict[str, Any]) -> None:
    one.load_state_dict(saved["manager"])
    held["w"] = saved["w"] + 100.0  # what is trained from here on differs


def end(one: Manager, *, how: str) -> None:
    if how == "publish":
        one.finish(publish=True)
    elif how == "loss":  # of all groups, without an end
        one.start_quorum()
        assert one._durability._writer.finish(60)


@pytest.mark.parametrize("how", ["shutdown", "loss", "publish"])
@pytest.mark.parametrize(("back_to", "until"), [(3, 4), (5, 6), (2, 3), (0, 1), (0, 6)])
async def test_a_job_that_went_back_resumes_from_what_it_did_later(
    lighthouse: str, tmp_path: Path, how: str, back_to: int, until: int
) -> None:
    def first(url: str, name: str) -> None:
        held, every = state(), 0 if how == "publish" else 2
        with manager(
            lighthouse, name, held, durable_relays=url, durable_every=every, min_replica_size=2, resume=False
        ) as one:
            saved = copy.deepcopy({"manager": one.state_dict(), "w": held["w"]})
            if back_to:  # else to the state before the first quorum
                one.start_quorum()
                saved = train(one, held, back_to + 1)
            train(one, held, 6)
            if how == "publish":
                one.save_checkpoint()
            go_back(one, held, saved)
            train(one, held, until)
            end(one, how=how)

    def second(url: str) -> tuple[int, float]:
        held = state()
        with manager(lighthouse, "c", held, durable_relays=url, durable_every=2) as one:
            assert one.resume()
            return one.current_step(), held["w"][0].item()

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        await run(*(partial(first, url, name) for name in "ab"))
        assert await listed(url)
        assert await run(partial(second, url)) == [(until, 100.0 + until)]
