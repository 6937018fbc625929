"""Tensors that wrap others, and values of other classes, arrive through a relay too."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import torch

from tests.services.relay_transport.scene import Groups, relay
from tests.support.checkpoints.checkpoint_peer import MINUTE, exchange
from tests.support.models.wrapped_tensor import parts, scaled


def state(seed: int) -> dict[str, Any]:
    return {
        "w": torch.full((4 << 20,), float(seed)),
        "exp_avg": scaled(seed, shape=(64, 1024)),
        "exp_avg_sq": scaled(seed + 1, shape=(64, 1024)),
        "milestones": Counter({seed: 1}),
    }


async def test_a_joiner_receives_them_through_a_relay() -> None:
    async with relay() as url:
        with Groups([url]) as groups:
            groups.stage(state=state(1))
            await groups.uploaded(url)
            joiner, into = groups.joiners[0], state(5)
            own = into["exp_avg"]
            joiner.prepare(exchange("j0", ["s0"], ["j0"], 1))
            got = await asyncio.to_thread(
                lambda: joiner.recv_checkpoint(0, groups.sources[0].metadata(), 1, MINUTE, into=into)
            )
    assert got["exp_avg"] is own
    expected = state(1)
    for name in ("exp_avg", "exp_avg_sq"):
        assert parts(got[name]) == parts(expected[name])
    assert torch.equal(got["w"], expected["w"])
    assert (type(got["milestones"]), got["milestones"]) == (Counter, Counter({1: 1}))
