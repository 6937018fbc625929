"""torch's own change of members (torch >= 2.14), beside keepstep's abort and rebuild."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from keepstep.process_group.store_exchange import reconfigure_over
from tests.gpu.check import Check, Result
from tests.gpu.collective_checks import ROUNDS
from tests.gpu.rank import TIMEOUT, Rank, seconds_of

HAS_RECONFIGURE = hasattr(dist.ProcessGroup, "reconfigure")


def time_native(rank: Rank) -> Result:
    backend = "nccl" if rank.on_gpu else "gloo"
    options: dict[str, Any] = {"enable_reconfigure": True}
    store = rank.store("native")
    dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.ranks, timeout=TIMEOUT, **options)
    world: Any = dist.group.WORLD
    native, rebuilt = [], []
    for number in range(1, ROUNDS + 1):
        meeting = rank.store(f"native/{number}")
        rank.meet(f"native/{number}")
        native.append(
            seconds_of(lambda s=meeting, n=number: reconfigure_over(world, s, rank.index, rank.ranks, TIMEOUT, uuid=n))  # type: ignore[misc]
        )
        tensor = rank.full(1, 1024)
        dist.all_reduce(tensor)
        rank.synchronize()
        assert tensor[0].item() == rank.ranks
    dist.destroy_process_group()
    group = rank.process_group()
    for number in range(1, ROUNDS + 1):
        group.abort("measured")
        rank.meet(f"rebuild/{number}")
        rebuilt.append(seconds_of(lambda n=number: rank.configure(group, n)))  # type: ignore[misc]
        rank.meet(f"rebuilt/{number}")  # an abort while the peer still connects would fail its configure
    ours, theirs = statistics.median(rebuilt), statistics.median(native)
    return {
        "torch's reconfigure p50, s": round(theirs, 4),
        "abort and rebuild p50, s": round(ours, 4),
        "ratio": round(theirs / ours, 2),
    }


CHECKS = (
    Check(
        "native",
        "Time of torch's own change of members, and of keepstep's abort and rebuild.",
        time_native,
        cannot_run="" if HAS_RECONFIGURE else f"torch {torch.__version__} has no reconfigure: needs torch >= 2.14",
    ),
)
