"""One rank of a sharded replica group for tests: FSDP2 over the ranks of the group, keepstep over the groups.

Blocks with activation checkpoints compute in bfloat16 and reduce in float32. Each step accumulates two micro-batches,
and clips the gradients. It prints lines as ``trainer.py`` does; "started" is the first of them. "committed" has also
"norm", the norm of the gradients, and "reductions", the number of all-reduces over the groups. The digest covers this
rank's shards of model and optimizer. Environment variables:

TRAINER_HOLD_REDUCTION   step in which rank 1 prints "reducing" before its second all-reduce, and waits
TRAINER_HOLD_HEAL=1      heal directly; rank 1 prints "healing" in the middle of its first heal, and waits
TRAINER_GO_ON            file whose existence ends these waits
TRAINER_REVERSED=1       torch.distributed numbers the ranks of the group in reverse order
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.append(str(Path(__file__).parents[3]))

from keepstep import HTTPTransport, Manager, Optimizer, ProcessGroupGloo
from keepstep.device_mesh import average_over_groups, ft_init_device_mesh
from tests.support.jobs.trainer import digest, say

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MICRO_BATCHES = 2
BALLAST_BYTES = 20 << 20
"""State of more than one chunk, so that a heal has a middle."""
PACE = 0.1
"""Seconds to sleep in each step: most steps only pass while a test waits, and eight ranks share a machine."""


def wait_for_test(event: str, **detail: object) -> None:
    say(event, **detail)
    while not Path(os.environ["TRAINER_GO_ON"]).exists():
        time.sleep(0.02)  # until the test, another process, lets it continue


class CountingManager(Manager):
    """Counts the all-reduces of a step, and waits before one of them."""

    reductions = 0

    def allreduce(self, *arguments: Any, **options: Any) -> Any:
        self.reductions += 1
        held = os.environ.get("TRAINER_HOLD_REDUCTION") == str(self.current_step())
        if held and RANK == 1 and self.reductions == 2:
            wait_for_test("reducing", step=self.current_step())
        return super().allreduce(*arguments, **options)


class HoldingTransport(HTTPTransport[Any]):
    """Waits after the first chunk of its first heal, on rank 1."""

    held = False

    def recv_checkpoint(self, *where: Any, progress: Callable[[int, int], None] | None = None, **options: Any) -> Any:
        def hold(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)
            if RANK == 1 and not self.held and 0 < done < total:
                self.held = True
                wait_for_test("healing", done=done, total=total)

        return super().recv_checkpoint(*where, progress=hold, **options)


def sharded_model(manager: Manager) -> nn.Module:
    mesh = ft_init_device_mesh(
        device_type="cpu",
        mesh_shape=(1, RANKS),
        mesh_dim_names=("dp_replicate", "dp_shard"),
        replicate_dim=0,
        manager=manager,
    )
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)]
    model = nn.Sequential(*map(checkpoint_wrapper, blocks), nn.Linear(64, 10))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh["dp_shard"], mp_policy=policy)
    average_over_groups(model, manager)
    return model


def train(manager: CountingManager, model: Any, optimizer: Any, adamw: torch.optim.Optimizer) -> None:
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    seed = int(os.environ["REPLICA_GROUP_ID"]) * RANKS + RANK
    random = torch.Generator().manual_seed(seed)
    while True:
        manager.reductions = 0
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
            batch = torch.randint(len(labels), (16,), generator=random)
            loss = nn.functional.cross_entropy(model(pixels[batch].float() / 16), labels[batch])
            torch.autograd.backward(loss / MICRO_BATCHES)
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        if optimizer.step():
            say(
                "committed",
                step=manager.current_step(),
                digest=digest(model.state_dict(), adamw.state_dict()),
                norm=norm.full_tensor().item(),
                reductions=manager.reductions,
                groups=manager.num_participants(),
                quorum_id=manager.state_dict().get("lineage"),
            )
        time.sleep(PACE)


def main() -> None:
    say("started")
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["REPLICA_GROUP_ID"]))  # groups begin apart: only healing makes them equal
    torch_rank = RANKS - 1 - RANK if "TRAINER_REVERSED" in os.environ else RANK
    dist.init_process_group("gloo", rank=torch_rank, world_size=RANKS)
    limit = timedelta(seconds=30)
    hold_heal = "TRAINER_HOLD_HEAL" in os.environ
    manager = CountingManager(
        pg=ProcessGroupGloo(timeout=limit),
        timeout=limit,
        checkpoint_transport=HoldingTransport(limit, 0, "127.0.0.1") if hold_heal else None,
    )
    model = sharded_model(manager)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ballast: dict[str, Any] = {"bytes": torch.zeros(BALLAST_BYTES, dtype=torch.uint8)}
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    manager.register_state_dict_fn("optimizer", adamw.load_state_dict, adamw.state_dict)
    manager.register_state_dict_fn("ballast", ballast.update, lambda: ballast)
    try:
        train(manager, model, Optimizer(manager, adamw), adamw)
    finally:
        manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
