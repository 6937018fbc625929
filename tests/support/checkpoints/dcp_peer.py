"""One of two ranks of the recipe of torch.distributed.checkpoint, with a relay as its storage. The model is FSDP2.

dcp_peer.py RANK STORE_FILE RELAY
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from keepstep import checkpoint
from keepstep.checkpoint import RelayReader, RelayWriter

TIMEOUT = timedelta(seconds=60)


class AppState(Stateful):
    """As in the recipe."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


class ToyModel(nn.Module):
    """As in the recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net2(self.relu(self.net1(x)))


class Odd:
    """A value that a checkpoint cannot store."""


def application(seed: int, *, steps: int) -> AppState:
    torch.manual_seed(seed)
    model: Any = fully_shard(ToyModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(8, 16)).sum().backward()
        optimizer.step()
    return AppState(model, optimizer)


def same(one: AppState, other: AppState) -> bool:
    mine, theirs = (
        [leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf for leaf in leaves(app.state_dict())]
        for app in (one, other)
    )
    pairs = zip(mine, theirs, strict=True)
    return all(a.equal(b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


def main(rank: int, store: str, relay: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    place = f"{relay}/v1/jobs/recipe/checkpoints"
    saved = application(1, steps=1)

    dcp.save({"app": saved, "step": 1}, storage_writer=RelayWriter(f"{place}/saved", step=1, timeout=TIMEOUT))
    loaded = application(2, steps=0)
    state = {"app": loaded, "step": 0}
    dcp.load(state, storage_reader=RelayReader(timeout=TIMEOUT), checkpoint_id=f"{place}/saved")
    assert same(saved, loaded)
    assert state["step"] == 1
    plain = application(4, steps=0)
    dcp.load({"app": plain}, checkpoint_id=f"{place}/saved")  # torch's own reader, over HTTP
    assert same(saved, plain)

    writer = RelayWriter(timeout=TIMEOUT)
    saving: Any = dcp.async_save({"app": saved}, storage_writer=writer, checkpoint_id=f"{place}/async")
    saving.result()
    dcp.save({"app": saved}, storage_writer=RelayWriter(f"{place}/alone"), use_collectives=False)
    for name in ("async", "alone"):
        other = application(3, steps=0)
        checkpoint.load({"app": other}, f"{place}/{name}", timeout=TIMEOUT)
        assert same(saved, other), name

    with pytest.raises(CheckpointException, match="Odd, which a checkpoint cannot store"):
        dcp.save({"app": saved, "odd": Odd() if rank else 1}, storage_writer=RelayWriter(f"{place}/failed"))

    names = ("x", "y") if rank else ("y", "x")  # collectives in different orders would wait for each other
    running = [checkpoint.async_save({"app": saved}, f"{place}/{name}", timeout=TIMEOUT) for name in names]
    for one in running:
        one.result(60)
    dist.destroy_process_group()
    print("ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
