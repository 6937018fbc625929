"""Committed checkpoints at a relay as directories of torch.distributed.checkpoint, over HTTP."""

from __future__ import annotations

import asyncio
import io
import pickle

import pytest
import torch

from keepstep import checkpoint
from keepstep_relay.core.events import Key
from keepstep_relay.torch_view import kept_directories
from tests.support.services.relay_driver import JOB, client, flip, relay, state

STATE = {"w": torch.arange(5_000_000, dtype=torch.float32), "v": torch.ones(3), "step": 7}
FILE = "__0_0.distcp"


async def save(address: str, name: str = "c1", values: dict[str, object] | None = None) -> str:
    """Save at the relay. Return the path of the directory."""
    path = f"/v1/jobs/{JOB}/checkpoints/{name}"
    await asyncio.to_thread(checkpoint.save, values or STATE, address + path, kind="live")
    return path


async def test_sizes_ranges_and_tags_are_those_of_one_file():
    async with relay() as one, client(one.address) as reader:
        path = await save(one.address)
        for name in (".metadata", FILE):
            whole = await reader.call("GET", f"{path}/{name}")
            async with reader.http.head(f"{one.address}{path}/{name}") as head:
                assert (head.status, int(head.headers["Content-Length"])) == (200, len(whole))
                assert head.headers["Accept-Ranges"] == "bytes"
            for first, last in ((0, 99), (90, 2000), (len(whole) - 1, len(whole) - 1)):
                headers = {"Range": f"bytes={first}-{last}"}
                async with reader.http.get(f"{one.address}{path}/{name}", headers=headers) as answer:
                    end = min(last + 1, len(whole))
                    assert (answer.status, await answer.read()) == (206, whole[first:end])
                    assert answer.headers["Content-Range"] == f"bytes {first}-{end - 1}/{len(whole)}"
                    assert answer.headers["ETag"] == head.headers["ETag"]
            await reader.call("GET", f"{path}/{name}", 416, headers={"Range": f"bytes={len(whole)}-"})
        # as torch loads it; the bytes are those of the relay that this test started
        metadata = pickle.loads(await reader.call("GET", f"{path}/.metadata"))
        at = metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "w")]
        item = (await reader.call("GET", f"{path}/{at.relative_path}"))[at.offset : at.offset + at.length]
        assert torch.load(io.BytesIO(item), weights_only=True).equal(STATE["w"])
        page = (await reader.call("GET", f"{path}/")).decode()
        assert '<a href=".metadata">' in page
        assert f'<a href="{FILE}">' in page


async def test_what_is_not_there_is_named():
    async with relay() as one, client(one.address) as reader:
        path = await save(one.address)
        for name in ("__1_0.distcp", "__x_0.distcp", "__00_0.distcp"):
            assert "has no rank" in (await reader.call("GET", f"{path}/{name}", 404))["detail"]
        await reader.call("GET", f"/v1/jobs/{JOB}/checkpoints/c2/.metadata", 404)
        await reader.begin("c3", step=1)
        refused = await reader.call("GET", f"/v1/jobs/{JOB}/checkpoints/c3/.metadata", 409)
        assert refused["detail"] == f"checkpoint c3 of job {JOB} is not committed: its state is begun"
        await one.checkpoints.remove(Key(JOB, "c1"), "removed in a test")
        await reader.call("GET", f"{path}/.metadata", 410)  # also if its directory was computed before


async def test_ranks_that_contradict_each_other_have_no_files():
    async with relay() as one, client(one.address) as writer:
        await writer.begin(ranks=2)
        for rank in range(2):
            of_rank = state(rank, 1000 + rank)
            await writer.manifest(of_rank, rank=rank)
            await writer.put(of_rank.pack)
        await writer.commit()
        refused = await writer.call("GET", f"{writer.checkpoints}/c1/.metadata", 409)
        assert "has no files for torch.distributed.checkpoint: " in refused["detail"]
        assert refused["detail"].endswith("use keepstep.checkpoint.load")


async def test_the_memory_of_directories_is_counted_and_few_are_kept(monkeypatch):
    monkeypatch.setattr(kept_directories, "MAX_DIRECTORIES", 1)
    async with relay() as one, client(one.address) as reader:
        paths = [
            await save(one.address, name, {"w": torch.full((3,), float(number))}) for number, name in enumerate("ab")
        ]
        memory = one.chunks.memory
        before = memory.used
        sizes = {len(await reader.call("GET", f"{path}/.metadata")) for path in paths}
        after = memory.used
        assert after > before + min(sizes)
        for path in paths * 2:
            await reader.call("GET", f"{path}/.metadata")
        assert memory.used == after
        await one.checkpoints.remove(Key(JOB, "b"), "removed in a test")
        assert memory.used < before, "neither its directory nor its manifest"


async def test_a_damaged_chunk_ends_the_download_and_is_never_sent(tmp_path):
    async with relay(data_dir=tmp_path) as one, client(one.address) as reader:
        path = await save(one.address)
        size = len(await reader.call("GET", f"{path}/{FILE}"))
    (largest,) = sorted(tmp_path.rglob("*"), key=lambda file: file.is_file() and file.stat().st_size)[-1:]
    flip(largest)
    async with relay(data_dir=tmp_path) as one, client(one.address) as reader:
        await reader.call("GET", f"{path}/.metadata")
        with pytest.raises(Exception, match=r"payload|disconnected|410"):
            assert len(await reader.call("GET", f"{path}/{FILE}")) == size
