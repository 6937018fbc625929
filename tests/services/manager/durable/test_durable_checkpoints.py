"""Durable checkpoints of Managers at real relays: writing, failures, and what a job resumes from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keepstep import Manager
from tests.services.manager.groups import manager, together
from tests.support.services.relay_driver import client, metric, relay_process

FROZEN = 2 << 20
"""Elements that never change: 8 MiB, one chunk of them."""


def state(value: float = 0.0) -> dict[str, Any]:
    return {"frozen": torch.arange(FROZEN, dtype=torch.float32), "w": torch.full((1000,), value)}


def step(one: Manager, held: dict[str, Any]) -> bool:
    """One step of an optimizer: the average of the groups, which all contribute 1."""
    one.start_quorum()
    gradient = torch.ones(1000)
    one.allreduce(gradient).wait()
    committed = one.should_commit()
    if committed:
        held["w"] += gradient
    return committed


def train(lighthouse: str, url: str, name: str, steps: int, **options: Any) -> tuple[int, float, Any]:
    """Return the step before the first one, the weights at the end, and what the Manager knows of its checkpoints."""
    held = state()
    with manager(lighthouse, name, held, durable_relays=url, init_sync=False, **options) as one:
        first = None
        while one.current_step() < steps:
            one.start_quorum()
            first = one.current_step() if first is None else first
            step(one, held)
        one.shutdown()
        assert held["w"].unique().numel() == 1
        return first or 0, held["w"][0].item(), one.last_checkpoint


async def run(*groups: Callable[[], Any]) -> list[Any]:
    return await asyncio.to_thread(together, *groups)


async def listed(url: str) -> dict[int, str]:
    async with client(url, job="default") as one:
        return {view["step"]: view["state"] for view in (await one.call("GET", one.checkpoints))["checkpoints"]}


async def test_a_job_whose_groups_are_gone_resumes_from_the_newest_on_another_number_of_groups(
    lighthouse: str, tmp_path: Path
) -> None:
    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        two = [partial(train, lighthouse, url, name, 5, durable_every=2, min_replica_size=2) for name in "ab"]
        for first, weight, last in await run(*two):
            assert (first, weight) == (0, 5.0)
            assert (last.step, last.error, last.relays) == (4, "", (url,))
        assert await listed(url) == {2: "committed", 4: "committed"}
        assert await metric(url, "received_bytes_total") < 1.2 * 4 * FROZEN, "what is frozen travels once"
        three = [partial(train, lighthouse, url, name, 8, durable_every=2, min_replica_size=3) for name in "cde"]
        for first, weight, last in await run(*three):
            assert (first, weight, last.step) == (4, 8.0, 8), "the last one is written at the end"
