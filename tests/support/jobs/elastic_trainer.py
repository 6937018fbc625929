"""A replica group for tests that draws its samples with an ElasticLoader.

It prints lines as ``trainer.py`` does. Before the forward pass of a step it prints "trains": the number of the "step",
its "quorum_id", the "epoch", and the "samples" that the gradient of this group is of. It prints "ended" after each
epoch. Environment variables: TRAINER_PACE as in ``trainer.py``; TRAINER_WORKERS, the number of processes that load
ahead.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parents[3]))

from keepstep import DistributedDataParallel, ElasticLoader, ElasticSampler, Manager, Optimizer, ProcessGroupGloo
from tests.support.jobs.trainer import PACE, digest, say

GLOBAL_BATCH = 100
"""Does not divide the number of samples, so that the last batch of an epoch is smaller."""


class Digits(Dataset[tuple[int, torch.Tensor, int]]):
    def __init__(self) -> None:
        self.pixels, self.labels = load_digits(return_X_y=True)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, torch.tensor(self.pixels[index], dtype=torch.float32) / 16, int(self.labels[index])


def quorum_of(manager: Manager) -> int | None:
    """Return the quorum_id of the open step; None: no quorum formed."""
    plan = manager.steps.attempt.plan if manager.steps.attempt is not None else None
    return None if plan is None else plan.quorum_id


def train(manager: Manager, model: nn.Module, adamw: torch.optim.Optimizer) -> None:
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw)
    digits = Digits()
    sampler = ElasticSampler(len(digits), manager, GLOBAL_BATCH, seed=3)
    workers = int(os.environ.get("TRAINER_WORKERS", "0"))
    loader = ElasticLoader(digits, sampler, num_workers=workers, multiprocessing_context="fork" if workers else None)
    while True:
        epoch = sampler.epoch
        for indices, pixels, labels in loader:
            counts = manager.is_participating() and sampler.weight > 0
            step, samples = manager.current_step() + 1, indices.tolist() if counts else []
            say("trains", step=step, quorum_id=quorum_of(manager), epoch=sampler.epoch, samples=samples)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(pixels), labels) * sampler.weight
            torch.autograd.backward(loss)
            if optimizer.step():
                state = digest(model.state_dict(), adamw.state_dict())
                lineage = manager.state_dict().get("lineage")
                say("committed", step=manager.current_step(), digest=state, quorum_id=lineage)
            else:
                say("discarded", step=manager.current_step())
            time.sleep(PACE)  # the pace that the test asks for
        say("ended", epoch=epoch)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    name = os.environ["REPLICA_GROUP_ID"]
    torch.manual_seed(int.from_bytes(name.encode(), "big") % 1000)  # groups begin apart: only healing makes them equal
    limit = timedelta(seconds=30)
    manager = Manager(ProcessGroupGloo(timeout=limit), timeout=limit)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    manager.register_state_dict_fn("optimizer", adamw.load_state_dict, adamw.state_dict)
    say("started", name=name)
    try:
        train(manager, model, adamw)
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()
