"""Configure, collectives, and reconfigurations."""

from __future__ import annotations

import gc
import os
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import ReduceOp, Work

from keepstep.process_group import ProcessGroup
from tests.gpu.check import Check, Result
from tests.gpu.rank import Rank, seconds_of

RECONFIGURATIONS = 50
SETTLED = 10
"""Reconfigurations after which caches of torch and NCCL have their size."""
GROWTH_BYTES = 64 << 20
"""Limit of the growth of memory in the rest of them; a leaked communicator has some MiB each."""
THREADS = 4
"""Limit of threads more than at ``SETTLED``: one communicator may still be on its way out."""
ROUNDS = 10
REDUCIBLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def all_collectives(rank: Rank) -> None:
    group, world, index = rank.process_group(), rank.ranks, rank.index
    rank.configure(group, 1)
    own, total = rank.full(index + 1, 8), world * (world + 1) / 2
    everybody = torch.cat([rank.full(one + 1, 8) for one in range(world)])

    def done(work: Work) -> None:
        work.wait()
        rank.synchronize()

    def equal(name: str, result: torch.Tensor, expected: torch.Tensor | float) -> None:
        assert bool((result == expected).all()), f"{name}: {result.tolist()}, expected {expected}"

    for name, operation, expected in (
        ("sum", ReduceOp.SUM, total),
        ("average", ReduceOp.AVG, total / world),
        ("maximum", ReduceOp.MAX, world),
        ("minimum", ReduceOp.MIN, 1),
    ):
        result = own.clone()
        done(group.allreduce([result], operation))
        equal(name, result, expected)
    for dtype in REDUCIBLE:
        typed = rank.full(index + 1, 8, dtype)
        done(group.allreduce([typed]))
        equal(f"sum of {dtype}", typed, total)
    both = [own.clone(), own.clone()]
    done(group.allreduce_coalesced(both))
    for one in both:
        equal("allreduce_coalesced", one, total)
    result = own.clone()
    done(group.broadcast_one(result, world - 1))
    equal("broadcast", result, world)
    listed = [torch.zeros_like(own) for _ in range(world)]
    done(group.allgather([listed], [own]))
    equal("allgather", torch.cat(listed), everybody)
    result = torch.zeros_like(everybody)
    done(group.allgather_into_tensor_coalesced([result], [own]))
    equal("allgather_into_tensor_coalesced", result, everybody)
    result = torch.zeros_like(own)
    done(group.reduce_scatter([result], [[one.clone() for one in everybody.chunk(world)]]))
    equal("reduce_scatter", result, world * (index + 1))
    result = torch.zeros_like(own)
    done(group.reduce_scatter_tensor_coalesced([result], [everybody.clone()]))
    equal("reduce_scatter_tensor_coalesced", result, world * (index + 1))
    result = torch.zeros_like(everybody)
    done(group.alltoall_base(result, own.repeat(world), [], []))
    equal("alltoall_base", result, everybody)
    result = torch.zeros_like(own)
    right, left = (index + 1) % world, (index - 1) % world
    pair: list[Callable[[], Work]] = [lambda: group.send([own], right), lambda: group.recv([result], left)]
    for step in pair if index % 2 == 0 else reversed(pair):  # NCCL's send waits for its receive
        done(step())
    equal("send and recv", result, left + 1)
    done(group.barrier())
    assert group.errored() is None


def reconfigure_often(rank: Rank) -> Result:
    group = rank.process_group()
    seconds, used, threads = [], [], []
    for quorum in range(1, RECONFIGURATIONS + 1):
        seconds.append(seconds_of(lambda quorum=quorum: rank.configure(group, quorum)))  # type: ignore[misc]
        tensor = rank.full(1, 1024)
        group.allreduce([tensor]).wait()
        assert group.errored() is None
        assert tensor[0].item() == rank.ranks
        if quorum in (SETTLED, RECONFIGURATIONS):
            rank.meet(f"measured/{quorum}")  # all ranks hold one communicator
            gc.collect()
            used.append(_used_bytes(rank))
            threads.append(threading.active_count())
            rank.meet(f"goes on/{quorum}")
    growth = used[1] - used[0]
    assert growth < GROWTH_BYTES, f"{growth / 1e6:.0f} MB more after {RECONFIGURATIONS - SETTLED} reconfigurations"
    assert threads[1] <= threads[0] + THREADS, f"{threads[0]} threads became {threads[1]}"
    return {"memory growth, MB": round(growth / 1e6, 1), "rebuild p50, s": round(statistics.median(seconds), 4)}


def _used_bytes(rank: Rank) -> int:
    """Return the used memory of the device; on a CPU the resident memory of this process."""
    if rank.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def time_collectives(rank: Rank) -> Result:
    group = rank.process_group()
    rebuilds = []
    for quorum in range(1, ROUNDS + 1):
        rank.meet(f"rebuild/{quorum}")
        rebuilds.append(seconds_of(lambda quorum=quorum: rank.configure(group, quorum)))  # type: ignore[misc]
    found: Result = {"rebuild p50, s": round(statistics.median(rebuilds), 4)}
    for label, elements in (("4 KiB", 1 << 10), ("16 MiB", 1 << 22)):
        found[f"all-reduce of {label}, ms"] = round(1e3 * _median_seconds(rank, group, elements), 3)
    return found


def _median_seconds(rank: Rank, group: ProcessGroup, elements: int) -> float:
    tensor = rank.full(1, elements)

    def once() -> None:
        group.allreduce([tensor]).wait()
        rank.synchronize()

    once()
    return statistics.median(seconds_of(once) for _ in range(ROUNDS))


CHECKS = (
    Check("collectives", "All collectives of two ranks give the values that they should.", all_collectives),
    Check("three_ranks", "All collectives of three ranks give the values that they should.", all_collectives, ranks=3),
    Check(
        "reconfigure",
        f"{RECONFIGURATIONS} reconfigurations leave no memory and no threads.",
        reconfigure_often,
        seconds=90.0,
    ),
    Check("time_two", "Time of a rebuild and of collectives of two ranks.", time_collectives),
    Check("time_three", "The same for three ranks.", time_collectives, ranks=3),
)
