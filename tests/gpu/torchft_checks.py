"""torchft's figures beside keepstep's, in one run. torchft is not a dependency: install it to have them."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from typing import Any

import torch.distributed as dist

from tests.gpu.check import Check, Result
from tests.gpu.collective_checks import ROUNDS
from tests.gpu.rank import TIMEOUT, Rank, seconds_of

ELEMENTS = 1 << 22
"""16 MiB, as in ``time_two``."""


def time_torchft(rank: Rank) -> Result:
    theirs = importlib.import_module("torchft.process_group")
    group = getattr(theirs, "ProcessGroupNCCL" if rank.on_gpu else "ProcessGroupGloo")(timeout=TIMEOUT)
    rebuilds = []
    for number in range(1, ROUNDS + 1):
        rank.meet(f"rebuild/{number}")
        rebuilds.append(seconds_of(lambda n=number: _configure(theirs, group, rank, n)))  # type: ignore[misc]
    tensor = rank.full(1, ELEMENTS)

    def once() -> None:
        group.allreduce([tensor], dist.ReduceOp.SUM).wait()
        rank.synchronize()

    once()
    assert tensor[0].item() == rank.ranks
    reduced = statistics.median(seconds_of(once) for _ in range(ROUNDS))
    group.abort()
    return {
        "torchft: rebuild p50, s": round(statistics.median(rebuilds), 4),
        "torchft: all-reduce of 16 MiB, ms": round(1e3 * reduced, 3),
    }


def _configure(theirs: Any, group: Any, rank: Rank, number: int) -> None:
    address = rank.address(f"torchft/{number}")
    if hasattr(theirs, "reconfigure_with_store"):  # since 2026
        theirs.reconfigure_with_store(group, address, rank.index, rank.ranks, TIMEOUT)
    else:
        group.configure(address, f"r{rank.index}", rank.index, rank.ranks)


CHECKS = (
    Check(
        "torchft",
        "Time of a rebuild and of an all-reduce of torchft, beside those of time_two.",
        time_torchft,
        cannot_run=""
        if importlib.util.find_spec("torchft")
        else "torchft is not installed: .venv/bin/python -m pip install torchft-nightly",
    ),
)
