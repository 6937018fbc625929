"""Save and load a sharded state on one of several ranks, with keepstep or Megatron Core, for ``sharded_speed.py``.

Arguments: LIBRARY (``keepstep`` or ``megatron``), rank, number of ranks, and the file of the store. Each command is a
line, and its answer the seconds of this rank from a barrier on:

* ``state SIZE TENSORS``: take a state of SIZE bytes over all ranks, in TENSORS tensors, for the next commands.
* ``save PLACE BACKEND``: save it. BACKEND is ``keepstep`` or ``torch_dist``.
* ``plan PLACE BACKEND``: until the request of a background save is there. The save is then completed.
* ``load PLACE``: load it into other memory.
* ``check``: compare what was loaded. The answer is ``equal``.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

State = dict[str, Any]


class Rank:
    """One rank of a save or load."""

    def __init__(self, library: str, rank: int, ranks: int) -> None:
        package = "megatron.core.dist_checkpointing" if library == "megatron" else "keepstep.sharded"
        self._entry = importlib.import_module(package)
        self._mapping = importlib.import_module(f"{package}.mapping")
        self._rank, self._ranks = rank, ranks
        self._saved: list[torch.Tensor] = []
        self._loaded: list[torch.Tensor] = []

    def state(self, size: int, tensors: int) -> None:
        random = torch.Generator().manual_seed(self._rank)
        shape = (size // 4 // tensors // self._ranks,)
        self._saved = [torch.randn(shape, generator=random) for _ in range(tensors)]
        self._loaded = [torch.zeros(shape) for _ in range(tensors)]

    def save(self, place: str, backend: str) -> None:
        self._entry.save(self._sharded(self._saved), place, (backend, 1))

    def begin(self, place: str, backend: str) -> Any:
        return self._entry.save(self._sharded(self._saved), place, (backend, 1), async_sharded_save=True)

    def load(self, place: str) -> None:
        loaded = self._entry.load(self._sharded(self._loaded), place)
        self._loaded = [loaded[f"layer{number}"] for number in range(len(self._loaded))]

    def check(self) -> str:
        pairs = zip(self._saved, self._loaded, strict=True)
        return "equal" if all(torch.equal(*pair) for pair in pairs) else "different"

    def _sharded(self, parts: list[torch.Tensor]) -> State:
        make = self._mapping.ShardedTensor.from_rank_offsets
        cut = (0, self._rank, self._ranks)
        return {f"layer{number}": make(f"layer{number}", part, cut) for number, part in enumerate(parts)}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def answer(ends: Rank, words: list[str]) -> object:
    name, *rest = words
    if name == "state":
        return timed(lambda: ends.state(*map(int, rest)))[0]
    if name == "plan":
        Path(rest[0]).mkdir(exist_ok=True)
        seconds, request = timed(lambda: ends.begin(*rest))
        request.execute_sync()
        return seconds
    if name == "check":
        return ends.check()
    if name == "save":
        Path(rest[0]).mkdir(exist_ok=True)  # Megatron Core expects the directory
    return timed(lambda: getattr(ends, name)(*rest))[0]


def main() -> None:
    library, rank, ranks, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if library == "megatron":  # it expects CUDA
        torch.cuda.synchronize = lambda *_, **__: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    ends = Rank(library, rank, ranks)
    print("ready", flush=True)
    for line in sys.stdin:
        print(answer(ends, line.split()), flush=True)


if __name__ == "__main__":  # Megatron Core starts processes
    main()
