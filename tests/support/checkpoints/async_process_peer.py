"""One rank that saves with dcp.async_save in a process of its own, then loads.

async_process_peer.py PLACE STORE_FILE
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from keepstep import checkpoint
from keepstep.checkpoint import RelayReader, RelayWriter


def main(place: str, store: str) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where torch's process for saves meets those of other ranks
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    state: dict[str, Any] = {"w": torch.arange(1000.0), "step": 3}
    writer = RelayWriter(step=3)
    saving: Any = dcp.async_save(
        state, checkpoint_id=place, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    state["w"].zero_()
    saving.result(100)
    into: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
    dcp.load(into, storage_reader=RelayReader(place))
    assert into["w"].equal(torch.arange(1000.0))
    assert into["step"] == 3

    again = checkpoint.async_save(
        {"w": into["w"]}, f"{place}-again", async_checkpointer_type=AsyncCheckpointerType.PROCESS, overwrite=True
    )
    into["w"].zero_()
    again.result(100)
    checkpoint.load(into, f"{place}-again", strict=False)
    assert into["w"].equal(torch.arange(1000.0))
    dist.destroy_process_group()
    print("ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
