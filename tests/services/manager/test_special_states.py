"""States with more than plain tensors and values: they heal and resume with their classes."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.services.manager.durable.test_durable_checkpoints import run, step
from tests.services.manager.groups import manager, together
from tests.support.models.wrapped_tensor import ScaledTensor, parts, scaled
from tests.support.services.relay_driver import relay_process


class Phase(Enum):
    WARM = 1
    FULL = 2


class Place(NamedTuple):
    shard: int
    offset: torch.Tensor


def state(seed: int) -> dict[str, Any]:
    """Return a state in which each value follows from ``seed``."""
    return {
        "w": torch.full((1000,), float(seed)),
        "exp_avg": scaled(seed),
        "exp_avg_sq": scaled(seed + 100),
        "unregistered": scaled(seed, ScaledTensor),
        "milestones": Counter({seed: 1}),
        "history": defaultdict(list, {"loss": [torch.tensor(float(seed))]}),
        "recent": deque([seed, torch.tensor(seed)], maxlen=4),
        "phase": Phase(seed),
        "place": Place(seed, torch.tensor(seed)),
        "file": Path(f"/data/{seed}"),
        "bits": bytearray([seed]),
    }


def plain(value: Any) -> Any:
    """Return ``value`` as something that ``==`` compares, with its class."""
    if isinstance(value, ScaledTensor):
        return parts(value)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return type(value), {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value), [plain(one) for one in value]
    return value


@pytest.mark.parametrize("over_pg", [False, True], ids=["http", "pg"])
def test_a_group_takes_over_such_a_state(lighthouse, over_pg):
    ready = threading.Barrier(2)

    def group(name: str, seed: int) -> Any:
        held = state(seed)
        own = held["exp_avg"]
        with manager(lighthouse, name, held, min_replica_size=2, heal_over_pg=over_pg) as m:
            ready.wait(30)
            m.start_quorum()
            tensor = torch.ones(1)
            m.allreduce(tensor).wait()
            assert m.should_commit()
            ready.wait(30)
            assert held["exp_avg"] is own, "received into the tensors that were there"
            return plain(held)

    a, b = together(lambda: group("a", 1), lambda: group("b", 2))
    assert a == b
    assert a in (plain(state(1)), plain(state(2)))


async def test_a_job_resumes_from_a_durable_checkpoint_of_such_a_state(lighthouse, tmp_path):
    def life(url: str, seed: int, steps: int) -> Any:
        held = state(seed)
        with manager(lighthouse, "a", held, durable_relays=url, durable_every=1, init_sync=False) as m:
            m.resume()
            for _ in range(steps):
                assert step(m, held)
                m._durability._writer.finish(60)
            return m.current_step(), plain(held)

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        (first,) = await run(partial(life, url, 1, 2))
        (second,) = await run(partial(life, url, 2, 0))
    assert first == second
    assert first[0] == 2
