"""Two groups train what two ranks of torch's DistributedDataParallel train, loop by loop, to the same weights."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import DistributedDataParallel, Optimizer, PureDistributedDataParallel
from tests.services.manager.groups import manager, together
from tests.support.models.training_loops import LOOPS, RANKS, STEPS, Loop, batch

DEADLINE = 60


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of rank 0 after each loop, trained by two processes with torch over Gloo."""
    folder: Path = tmp_path_factory.mktemp("torch")
    command = [sys.executable, "-m", "tests.support.models.training_loops"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder / "store"), str(folder / f"{rank}.pt")])
        for rank in range(RANKS)
    ]
    assert [one.wait(300) for one in ranks] == [0] * RANKS
    return torch.load(folder / "0.pt")


def train(lighthouse: str, loop: Loop, wrapper: Any) -> list[dict[str, torch.Tensor]]:
    ready = threading.Barrier(RANKS)

    def group(rank: int) -> dict[str, torch.Tensor]:
        net = loop.net()
        with manager(lighthouse, f"r{rank}", min_replica_size=2, init_sync=False) as m:
            ddp, optimizer = wrapper(m, net), Optimizer(m, loop.optimizer(net.parameters()))
            ready.wait(DEADLINE)
            for step in range(STEPS):
                loop.change(net, optimizer, step)
                optimizer.zero_grad()
                loop.loss(ddp, batch(rank, step), rank, step).backward()
                assert optimizer.step(), m.errored()
            ready.wait(DEADLINE)
            return net.state_dict()

    return together(lambda: group(0), lambda: group(1))


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
@pytest.mark.parametrize("name", LOOPS)
def test_two_groups_train_as_two_ranks_of_torch(lighthouse, of_torch, name, wrapper):
    for state in train(lighthouse, LOOPS[name], wrapper):
        assert state.keys() == of_torch[name].keys()
        for key, value in of_torch[name].items():
            torch.testing.assert_close(
                state[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
            )
