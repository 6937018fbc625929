"""The recipe of torch.distributed.checkpoint with a relay as storage, in two processes."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from keepstep.checkpoint import CheckpointNotFound, RelayReader, load
from tests.support.checkpoints.dcp_peer import ToyModel
from tests.support.services.relay_driver import relay

PEERS = Path(__file__).parents[2] / "support" / "checkpoints"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
async def test_two_ranks_save_and_load_through_a_relay_and_a_third_process_loads_without_a_group(tmp_path):
    """Starts two processes that train with FSDP2, which takes some seconds."""
    async with relay(data_dir=tmp_path / "relay") as one:
        command = [sys.executable, str(PEERS / "dcp_peer.py")]
        ranks = [
            await asyncio.create_subprocess_exec(
                *command, str(rank), str(tmp_path / "store"), one.address, stdout=asyncio.subprocess.PIPE
            )
            for rank in range(2)
        ]
        try:
            async with asyncio.timeout(110):
                assert [(await rank.communicate())[0] for rank in ranks] == [b"ok\n", b"ok\n"]
        finally:
            for rank in ranks:
                if rank.returncode is None:
                    rank.kill()
                    await rank.wait()
        place = f"{one.address}/v1/jobs/recipe/checkpoints"
        model = await asyncio.to_thread(check_without_a_group, place)
        plain = await asyncio.create_subprocess_exec(
            # A flag of Python: the process must not be forked from one that has imported keepstep.
            *(sys.executable, "-u", str(PEERS / "plain_torch_peer.py"), f"{place}/saved"),
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(110):
            printed, _ = await plain.communicate()
        assert json.loads(printed) == [1, model(torch.ones(16)).tolist()]


async def test_a_process_of_torch_saves_in_the_background(tmp_path):
    """Starts a process, which starts another one: it takes as long as two imports of torch."""
    peer = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PEERS / "async_process_peer.py"), str(tmp_path / "saved"), str(tmp_path / "store")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(110):
        printed, logged = await peer.communicate()
    assert (printed, peer.returncode) == (b"ok\n", 0), logged.decode()


def check_without_a_group(place: str) -> ToyModel:
    """Load as the recipe does for inference, and as dcp_to_torch_save does."""
    model = ToyModel()
    state = {"app": {"model": model.state_dict()}}
    dcp.load(state, storage_reader=RelayReader(f"{place}/saved"))
    model.load_state_dict(state["app"]["model"])

    everything: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    _load_state_dict(
        everything, storage_reader=RelayReader(f"{place}/saved"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    for name, value in model.state_dict().items():
        assert everything["app"]["model"][name].equal(value)

    with pytest.raises(CheckpointNotFound, match="was deleted: rank 1 failed"):
        load({"app": {}}, f"{place}/failed", timeout=timedelta(seconds=30))
    return model
