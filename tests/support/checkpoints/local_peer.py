"""Local checkpoints of several ranks, with Megatron Core or with keepstep: both have the same API.

``python local_peer.py LIBRARY RANKS FOLDER`` forks a process for each rank, and writes what each has seen as JSON to
``FOLDER/LIBRARY-RANK.json``. The Python of either library runs it, so it imports nothing of tests.

With an even number of ranks, two are tensor-parallel and the others data-parallel; otherwise all are data-parallel. If
nvidia-resiliency-ext can be imported, its manager stores and replicates the states too.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import multiprocessing
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

library, size, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
package = "megatron.core.dist_checkpointing" if library == "megatron" else "keepstep.sharded"

STRICT = ("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "return_unexpected",
          "return_all", "ignore_all")  # fmt: skip


def on_cpu(function: Any) -> Any:
    """Megatron Core and nvidia-resiliency-ext ask for tensors on CUDA."""
    return lambda *args, **kwargs: function(
        *args, **{name: "cpu" if name == "device" and str(one) == "cuda" else one for name, one in kwargs.items()}
    )


for name in ("empty", "empty_like"):
    setattr(torch, name, on_cpu(getattr(torch, name)))
setattr(torch.Tensor, "cuda", lambda self: self)  # noqa: B010  mypy refuses the plain form
torch.cuda.synchronize = lambda *_, **__: None
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


class World:
    """The state of one rank."""

    def __init__(self, rank: int) -> None:
        self.mapping = importlib.import_module(f"{package}.mapping")
        self.local = importlib.import_module(f"{package}.tensor_aware_state_dict").MCoreTensorAwareStateDict
        self.rank, self.tp = rank, 2 if size % 2 == 0 else 1
        self.at_tp, self.at_dp = rank % self.tp, rank // self.tp

    def halves(self, key: str, data: Any, replica_id: Any, flattened_range: Any = None) -> dict[str, Any]:
        del flattened_range
        make = self.mapping.ShardedTensor.from_rank_offsets
        return {
            name: make(f"{key}.{name}", one, replica_id=replica_id)
            for name, one in zip("wv", data.chunk(2), strict=True)
        }

    def state(self, *, is_save: bool) -> dict[str, Any]:
        make, cut = self.mapping.ShardedTensor.from_rank_offsets, (0, self.at_tp, self.tp)

        def values(*shape: int, start: int) -> torch.Tensor:
            count = torch.Size(shape).numel()
            found = torch.arange(start, start + count, dtype=torch.float32).view(shape)
            return found if is_save else torch.zeros_like(found)

        state = {
            "cut": make("cut", values(4, 3, start=100 * self.at_tp), cut, replica_id=self.at_dp),
            "half": make("half", values(5, start=7).bfloat16(), replica_id=(self.at_tp, self.at_dp)),
            "layers": [
                make("layers", values(2, start=at), (0, at, 3), replica_id=self.rank, prepend_axis_num=1)
                for at in range(3)
            ],
            "own": make("own", values(2, start=self.rank), (0, self.rank, size)),
            "fused": self.mapping.ShardedTensorFactory(
                "fused", values(4, 2, start=50), self.halves, lambda one: torch.cat([one["w"], one["v"]]),
                replica_id=self.rank,
            ),
            "random": self.mapping.ShardedObject("random", self.rank if is_save else None, (size,), (self.rank,)),
            "mine": self.mapping.LocalNonpersistentObject(f"rank {self.rank}"),
        }  # fmt: skip
        return {**state, "step": 3} if is_save else state

    def seen(self) -> dict[str, Any]:
        """Save and load with each algorithm, and take the tensors out and put them in between."""
        found: dict[str, Any] = {}
        for algo in ("atomic", "fully_parallel"):
            local, metadata = self.local.from_state_dict(self.state(is_save=True), algo)
            found[f"{algo} holds"] = [[list(one.shape), str(one.dtype)] for one in local.tensors]
            again, _ = self.local.from_state_dict(self.state(is_save=True), algo, cached_metadata=metadata)
            found[f"{algo} holds with the metadata of before"] = len(list(again.tensors))
            taken = local.pop_tensors()
            hollow = pickle.loads(pickle.dumps(local))
            found[f"{algo} hollow"] = [local.is_hollow, hollow.is_hollow]
            hollow.insert_tensors(taken)
            hollow.copy_tensors_to_cpu()
            hollow.restore_tensor_device()
            for exchange in ("broadcast", "gather_object"):
                found[f"{algo} {exchange}"] = plain(hollow.to_state_dict(self.state(is_save=False), algo, exchange))
            found[f"{algo} common"] = plain(hollow.to_state_dict({}))
        for strict, extra in itertools.product(STRICT, (False, True)):  # with fully_parallel, Megatron Core hangs
            found[f"{strict}, {extra=}"] = self.strictly(strict, extra=extra)
        return found

    def strictly(self, strict: str, *, extra: bool) -> Any:
        """Return the keys that only one side has, or whether an error names the one that only the request has."""
        local, _ = self.local.from_state_dict(self.state(is_save=True), "atomic")
        request = self.state(is_save=False)
        del request["half"]
        if extra:
            whole = self.mapping.ShardedTensor.from_rank_offsets("extra", torch.zeros(1), replica_id=self.rank)
            request["extra"] = whole
        try:
            _, *keys = local.to_state_dict(request, strict=strict, return_mismatch_keys=True)
        except Exception as error:  # noqa: BLE001  an outcome too
            return ["error", "extra" in str(error)]
        return list(map(sorted, keys))

    def stored(self) -> dict[str, Any]:
        """Save with the manager of nvidia-resiliency-ext, lose the files of rank 0, and load."""
        ext = "nvidia_resiliency_ext.checkpointing.local"
        manager = importlib.import_module(f"{ext}.ckpt_managers.local_manager").LocalCheckpointManager
        replication = importlib.import_module(f"{ext}.replication.strategies").CliqueReplicationStrategy
        base = importlib.import_module(f"{ext}.base_state_dict").TensorAwareStateDict
        queue = importlib.import_module(f"{package}.strategies" + (".async_utils" if library == "megatron" else ""))
        found: dict[str, Any] = {}
        for algo in ("atomic", "fully_parallel"):
            place = folder / f"{library}-{algo}"
            copies = replication.from_replication_params(1, size) if size > 1 else None
            saver = manager(str(place), repl_strategy=copies)
            local, _ = self.local.from_state_dict(self.state(is_save=True), algo)
            found[f"{algo} is one"] = isinstance(local, base)
            calls = queue.AsyncCallsQueue()
            number = calls.schedule_async_request(saver.save(local, 5, is_async=True))
            found[f"{algo} finalized"] = [calls.maybe_finalize_async_calls(blocking=True), number]
            dist.barrier()
            if self.rank == 0 and copies:
                shutil.rmtree(place / "0")
            dist.barrier()
            loader = manager(str(place), repl_strategy=copies)
            found[f"{algo} latest"] = loader.find_latest()
            again, _ = loader.load()
            found[f"{algo} stored"] = plain(again.to_state_dict(self.state(is_save=False), algo))
        return found


def plain(state: Any) -> Any:
    """Return what JSON can hold, in the order of the keys."""
    if isinstance(state, dict):
        return {key: plain(state[key]) for key in sorted(state)}
    if isinstance(state, list | tuple):
        return list(map(plain, state))
    return [str(state.dtype), state.float().tolist()] if isinstance(state, torch.Tensor) else state


def be_rank(rank: int) -> None:
    store = dist.FileStore(str(folder / f"{library}.store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = World(rank)
    found = world.seen()
    if importlib.util.find_spec("nvidia_resiliency_ext"):
        found |= world.stored()
    (folder / f"{library}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    torch.set_num_threads(1)
    importlib.import_module(package)
    ranks = [multiprocessing.get_context("fork").Process(target=be_rank, args=(rank,)) for rank in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return sum(bool(one.exitcode) for one in ranks)


if __name__ == "__main__":
    sys.exit(main())
