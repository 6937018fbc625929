"""Groups of several ranks that shard their model (HSDP)."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from keepstep import Manager, Optimizer
from keepstep.device_mesh import average_over_groups
from tests.gpu.check import DIGEST, Check, Result
from tests.gpu.rank import TIMEOUT, Rank
from tests.gpu.training_checks import STEPS, loss_of, small_model

RANKS_OF_GROUP = 2
LOCALHOST = "127.0.0.1"


def train_sharded(rank: Rank) -> Result:
    """Two groups of two ranks. The ranks of a group shard the model with FSDP2; the groups average its gradients."""
    group, within = divmod(rank.index, RANKS_OF_GROUP)
    served = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False) if within == 0 else None
    if served is not None:
        rank.tell(f"store/{group}", str(served.port))
    port = int(rank.await_told(f"store/{group}"))
    backend = "nccl" if rank.on_gpu else "gloo"
    inside = rank.store(f"inside/{group}")
    dist.init_process_group(backend, store=inside, rank=within, world_size=RANKS_OF_GROUP, timeout=TIMEOUT)
    model = small_model(seed=group).to(rank.device)
    fully_shard(model, mesh=init_device_mesh(rank.device.type, (RANKS_OF_GROUP,)))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = Manager(
        pg=rank.process_group(),
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=rank.ranks // RANKS_OF_GROUP,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=within,
        world_size=RANKS_OF_GROUP,
        store_addr=LOCALHOST,
        store_port=port,
        lighthouse_addr=rank.lighthouse,
        replica_id=f"g{group}",
    )
    average_over_groups(model, manager)
    optimizer = Optimizer(manager, inner)
    torch.manual_seed(rank.index)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        loss_of(rank, model).backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor), "the model is not sharded"
        digest.update(parameter.detach().full_tensor().cpu().numpy().tobytes())
    manager.shutdown()
    dist.destroy_process_group()
    return {DIGEST: digest.hexdigest()[:16]}


CHECKS = (
    Check(
        "hsdp",
        "Two groups of two ranks shard the model inside the group, and all weights are equal bit for bit.",
        train_sharded,
        ranks=4,
        seconds=90.0,
        lighthouse=True,
    ),
)
