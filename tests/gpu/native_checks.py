"""torch's own change of members (torch >= 2.14), beside keepstep's abort and rebuild."""

from __future__ import annotations

import os
import statistics
from typing import Any

import torch
import torch.distributed as dist

from keepstep.process_group import ProcessGroup
from keepstep.process_group.store_exchange import reconfigure_over
from keepstep.process_group.torch_backends.membership_changes import MemberChange, missing_for_torch
from tests.gpu.check import Check, Result
from tests.gpu.collective_checks import ROUNDS
from tests.gpu.rank import TIMEOUT, Rank, seconds_of

NCCL = "nccl2" if hasattr(dist, "ProcessGroupNCCL2") else "nccl"
"""Name of the backend with ``reconfigure``. In torch 2.14 ``nccl`` is another one."""
HAS_RECONFIGURE = hasattr(dist.ProcessGroup, "reconfigure")


def time_native(rank: Rank) -> Result:
    """The process group of torch itself, as a Manager accepts it too."""
    backend = NCCL if rank.on_gpu else "gloo"
    options: dict[str, Any] = {"enable_reconfigure": True}
    store = rank.store("native")
    dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.ranks, timeout=TIMEOUT, **options)
    world: Any = dist.group.WORLD
    native = []
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
    return _beside(native, _rebuilds(rank))


def change_members(rank: Rank) -> Result:
    """keepstep's process group with each of the two: alone, together, and in another order."""
    seconds = {}
    for change in (MemberChange.TORCH, MemberChange.REBUILD):
        os.environ["KEEPSTEP_NCCL_MEMBERS"] = change
        group = rank.process_group()
        for number in range(ROUNDS):
            rank.configure(group, 3 * number, [rank.index])
            for quorum, members in ((3 * number + 1, (0, 1)), (3 * number + 2, (1, 0))):
                rank.meet(f"{change}/{quorum}")
                took = seconds_of(lambda g=group, q=quorum, m=members: rank.configure(g, q, m))  # type: ignore[misc]
                seconds.setdefault(change, []).append(took)
                tensor = rank.full(1 + rank.index, 1024)
                group.allreduce([tensor]).wait()
                assert group.errored() is None
                assert tensor[0].item() == 3
                rank.meet(f"{change}/{quorum}/done")
        group.abort("checked")
        rank.meet(f"{change}/aborted")
        rank.configure(group, 3 * ROUNDS)
        group.shutdown()
    return _beside(seconds[MemberChange.TORCH], seconds[MemberChange.REBUILD])


def _rebuilds(rank: Rank) -> list[float]:
    """Return the times of an abort and a rebuild."""
    os.environ["KEEPSTEP_NCCL_MEMBERS"] = MemberChange.REBUILD
    group: ProcessGroup = rank.process_group()
    rebuilt = []
    for number in range(1, ROUNDS + 1):
        group.abort("measured")
        rank.meet(f"rebuild/{number}")
        rebuilt.append(seconds_of(lambda n=number: rank.configure(group, n)))  # type: ignore[misc]
        rank.meet(f"rebuilt/{number}")  # an abort while the peer still connects would fail its configure
    return rebuilt


def _beside(native: list[float], rebuilt: list[float]) -> Result:
    ours, theirs = statistics.median(rebuilt), statistics.median(native)
    return {
        "torch's reconfigure p50, s": round(theirs, 4),
        "abort and rebuild p50, s": round(ours, 4),
        "ratio": round(theirs / ours, 2),
    }


CHECKS = (
    Check(
        "native",
        "Time of the change of members of torch's own process group, and of keepstep's abort and rebuild.",
        time_native,
        cannot_run="" if HAS_RECONFIGURE else f"torch {torch.__version__} has no reconfigure: needs torch >= 2.14",
    ),
    Check(
        "members",
        "Groups leave, join and change their order with torch's change of members and without it.",
        change_members,
        needs_gpu="torch's change of members is used with NCCL only",
        cannot_run=f"it needs {missing_for_torch()}" if missing_for_torch() else "",
    ),
)
