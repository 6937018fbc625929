"""One of two ranks that hold a DTensor: saves its shard, loads it into another DTensor, and tries what must be refused.

sharded_peer.py RANK STORE_FILE
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from keepstep.checkpointing import TransferError
from keepstep.checkpointing.state.serialization import load_state, save_state
from keepstep.checkpointing.state.state_manifest import read_manifest


def refused(manifest, pack, into):
    try:
        load_state(manifest, pack, into)
    except TransferError as error:
        return str(error)
    raise AssertionError("it was loaded")


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    full = torch.arange(15.0).reshape(5, 3)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    manifest, pack = save_state({"w": sharded})
    sharding = read_manifest(manifest).content.tensors[0].sharding
    assert sharding is not None
    assert sharding.global_shape == (5, 3)
    assert sharding.global_offset == (3 * rank, 0)
    assert len(pack) == (36 if rank == 0 else 24)

    target = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])
    place = target.to_local().data_ptr()
    loaded = load_state(manifest, pack, {"w": target})
    assert loaded["w"] is target
    assert target.to_local().data_ptr() == place
    assert target.full_tensor().equal(full)

    assert "is one shard of a DTensor: pass `into`" in refused(manifest, pack, None)
    other = distribute_tensor(torch.zeros(5, 3), mesh, [Replicate()])
    assert "is sharded as" in refused(manifest, pack, {"w": other})
    dist.destroy_process_group()
    print("ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
