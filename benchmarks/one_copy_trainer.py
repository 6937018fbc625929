"""Train a model that is sharded over all ranks with FSDP2, for ``one_copy.py``.

``--library keepstep`` uses ``OneCopy``; ``torch`` is FSDP2 alone, which writes a checkpoint with
torch.distributed.checkpoint every ``--every`` steps and loads the newest one at its start. After each step a rank
writes a line: the time of day, the number of the step, the bytes of copies that it keeps, and its CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

FEATURES = 1024
LAYER_BYTES = 3 * 4 * (FEATURES * FEATURES + FEATURES)
"""Of the parameters of a layer and their state in Adam."""


def build(mesh: object, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer of this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(layers)))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def loss_of(model: nn.Module, step: int, rank: int, batch: int) -> torch.Tensor:
    """Return the loss of the samples of a rank in a step."""
    samples = torch.randn(batch, FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank))
    return model(samples).square().mean()


def train_keepstep(options: argparse.Namespace, out: Path) -> None:
    """Train with ``OneCopy``."""
    from keepstep.one_copy import OneCopy

    job = OneCopy(lambda mesh: build(mesh, options.layers), copies=1)
    (out / f"ready-{os.getpid()}").touch()
    with (out / f"{os.getpid()}").open("w") as lines:
        while job.step < options.steps:
            with job.attempt() as (model, _):
                loss_of(model, job.step, job.rank, options.batch).backward()
                job.commit()
                lines.write(f"{time.time()} {job.step} {job.copies_bytes} {time.process_time()}\n")
                lines.flush()
    job.finish()


def train_torch(options: argparse.Namespace, out: Path) -> None:
    """Train with FSDP2 alone."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    # Restarted ranks of torch 2.13 find the addresses of those before in the store of torchrun, so each attempt has a
    # prefix of its own.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", agent)
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", store=store, **ranks)
    model, optimizer = build(init_device_mesh("cpu", (dist.get_world_size(),)), options.layers)
    saved = out / "checkpoints"
    newest = max((int(one.parent.name) for one in saved.glob("*/.metadata")), default=0)
    if newest:
        weights, adam = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": adam}
        dcp.load(state, checkpoint_id=saved / str(newest))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    with (out / f"{os.getpid()}").open("w") as lines:
        for step in range(newest, options.steps):
            loss_of(model, step, dist.get_rank(), options.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            lines.write(f"{time.time()} {step + 1} 0 {time.process_time()}\n")
            lines.flush()
            if options.every and (step + 1) % options.every == 0:
                weights, adam = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": adam}, checkpoint_id=saved / str(step + 1))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=("torch", "keepstep"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train = train_keepstep if options.library == "keepstep" else train_torch
    train(options, options.out)


if __name__ == "__main__":
    main()
