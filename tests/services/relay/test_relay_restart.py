"""Relays that are killed, disks that are full or rot, memory that is full: what was committed is there bit for bit."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.core.events import Limits, Tier
from keepstep_relay.core.invariants import check_invariants
from keepstep_relay.tiers.disk_tier import DiskTier
from tests.support.services.relay_driver import (
    DEADLINE,
    Client,
    client,
    flip,
    make_unreadable,
    raw,
    relay,
    relay_process,
    state,
    store_durable,
)

ONE, TWO = state(1), state(2)
SMALL = 64 << 20


async def killed(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        await process.wait()


async def on_disk(worker: Client, count: int) -> None:
    """Until so many chunks are written, which is done behind the answer."""
    async with asyncio.timeout(DEADLINE):
        while (await worker.show())["checkpoint"]["on_disk"] != count:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.01)


async def test_killed_after_a_commit_it_has_all_of_it_again(tmp_path: Path) -> None:
    async with relay_process("--data-dir", str(tmp_path)) as (process, address), client(address) as worker:
        await worker.store(ONE)
        answer = await worker.show()
        await killed(process)
    async with relay_process("--data-dir", str(tmp_path)) as (_, address), client(address) as worker:
        again = await worker.show()
        assert again["checkpoint"] == answer["checkpoint"] | {"in_memory": 0}
        assert await worker.call("GET", f"{worker.checkpoints}/c1/manifest") == ONE.manifest
        assert await worker.pack() == ONE.pack


@pytest.mark.parametrize("uploaded", [(), (1,), (0, 2), (0, 1, 2)])
async def test_killed_before_a_commit_it_goes_on_with_the_missing_chunks(
    tmp_path: Path, uploaded: tuple[int, ...]
) -> None:
    async with relay_process("--data-dir", str(tmp_path)) as (process, address), client(address) as worker:
        await worker.store(TWO, "c0", 0)
        await worker.upload(ONE, chunks=uploaded)
        await on_disk(worker, len(uploaded))
        await killed(process)
    async with relay_process("--data-dir", str(tmp_path)) as (_, address), client(address) as worker:
        assert [await worker.has(digest) for digest in ONE.digests] == [number in uploaded for number in range(3)]
        assert (await worker.begin(status=200))["committed"] is None
        plan = await worker.manifest(ONE)
        assert plan["lacking"] == 3 - len(uploaded)
        for number in set(range(3)) - set(uploaded):
            await worker.put(ONE.chunks[number])
        await worker.commit()
        assert await worker.pack() == ONE.pack
        assert await worker.pack("c0") == TWO.pack


async def test_killed_in_the_middle_of_a_chunk_it_does_not_have_that_chunk(tmp_path: Path) -> None:
    async with relay_process("--data-dir", str(tmp_path)) as (process, address), client(address) as worker:
        await worker.upload(ONE, chunks=[0])
        await on_disk(worker, 1)
        head = f"PUT /v1/chunks/{ONE.digests[1]} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {CHUNK_BYTES}\r\n\r\n"
        async with raw(address, head.encode() + ONE.chunks[1][: CHUNK_BYTES // 2]):
            await killed(process)
    async with relay_process("--data-dir", str(tmp_path)) as (_, address), client(address) as worker:
        assert [await worker.has(digest) for digest in ONE.digests] == [True, False, False]
        assert not list((tmp_path / "partial").iterdir())


async def test_killed_at_any_moment_it_never_has_a_commit_that_is_incomplete(tmp_path: Path) -> None:
    """Uploads one after the other until the relay is killed under them; what it says is committed then is complete."""
    states = [state(10 + number, CHUNK_BYTES + 5000) for number in range(12)]
    committed: list[int] = []

    async def upload_all(address: str) -> None:
        async with client(address) as worker:
            for number, one in enumerate(states):
                await worker.store(one, f"c{number}", number)
                committed.append(number)

    for kills in range(3):
        async with relay_process("--data-dir", str(tmp_path), "--keep-live", "0") as (process, address):
            committed.clear()
            uploading = asyncio.create_task(upload_all(address))
            async with asyncio.timeout(DEADLINE):
                while len(committed) <= 3 * kills and not uploading.done():  # noqa: ASYNC110 - it is killed in the meantime
                    await asyncio.sleep(0.001)
            await killed(process)
            await asyncio.wait([uploading])
            uploading.exception()
        async with (
            relay_process("--data-dir", str(tmp_path), "--keep-live", "0") as (_, address),
            client(address) as worker,
        ):
            answer = await worker.call("GET", worker.checkpoints)
            there = {one["step"] for one in answer["checkpoints"] if one["committed"] is not None}
            assert there >= set(committed), "what was acknowledged is there"
            for step in there:
                assert await worker.pack(f"c{step}") == states[step].pack
            for name in await worker.list():
                await worker.call("DELETE", f"{worker.checkpoints}/{name}", 204)


async def test_stopped_in_good_order_it_writes_what_it_took(tmp_path: Path) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await worker.upload(ONE)
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        assert (await worker.show())["checkpoint"]["lacking"] == 0
        await worker.commit()
        assert await worker.pack() == ONE.pack


async def test_a_reader_goes_on_over_a_restart_with_its_missing_range(tmp_path: Path) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await worker.store(ONE)
        got = await worker.pack(status=206, headers={"Range": f"bytes=0-{CHUNK_BYTES + 99}"})
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        rest = await worker.pack(status=206, headers={"Range": f"bytes={len(got)}-"})
        assert got + rest == ONE.pack


async def test_an_age_goes_on_over_a_restart(tmp_path: Path) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await store_durable(worker, ONE, "c1", 1)
        await store_durable(worker, TWO, "c2", 2)
    limits = Limits(durable_seconds=0.01)
    async with relay(data_dir=tmp_path, limits=limits) as one, client(one.address) as worker:
        async with asyncio.timeout(DEADLINE):
            while await worker.list() != ["c2"]:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
        assert await worker.list() == ["c2"]


async def test_an_upload_that_ended_while_its_manifest_was_written_can_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on, put_manifest = threading.Event(), threading.Event(), DiskTier.put_manifest

    def slow(disk: DiskTier, *arguments: Any) -> None:
        writing.set()
        go_on.wait(DEADLINE)
        put_manifest(disk, *arguments)

    monkeypatch.setattr(DiskTier, "put_manifest", slow)
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await worker.begin()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.manifest(ONE, status=410))
            await asyncio.to_thread(writing.wait, DEADLINE)
            tasks.create_task(worker.call("POST", f"{worker.checkpoints}/c1/abort", 204, json={"reason": "asked"}))
            async with asyncio.timeout(DEADLINE):
                while await worker.list():  # noqa: ASYNC110 - nothing tells it
                    await asyncio.sleep(0.01)
            go_on.set()
        await worker.store(ONE)
        assert await worker.pack() == ONE.pack


async def test_files_of_others_in_its_folder_neither_stop_its_start_nor_are_deleted(tmp_path: Path) -> None:
    foreign = [
        *("notes", "chunks/notes", "chunks/00/notes", f"chunks/00/{'00' * 31}ZZ", "partial/notes", "partial/7x/notes"),
        *("partial/8/notes", "checkpoints/notes", "checkpoints/other/notes", "checkpoints/other/2026/notes"),
        *("checkpoints/job/c1/notes", "checkpoints/job/c2/manifest-0.old", f"chunks/0a/{'0b' * 32}"),
        f"chunks/0a/{'0a' * 32}/notes",
    ]
    async with relay_process("--data-dir", str(tmp_path)) as (_, address), client(address) as worker:
        await worker.store(ONE)
    for name in foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("not the relay's")
    for left in ("checkpoints/job/c3/manifest-0", "partial/3"):
        (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left).write_text("the relay's")
    async with relay_process("--data-dir", str(tmp_path)) as (_, address), client(address) as worker:
        assert await worker.pack() == ONE.pack
        await worker.call("DELETE", f"{worker.checkpoints}/c1", 204)
        await worker.store(TWO, "c1")
        assert await worker.pack() == TWO.pack
    for name in foreign:
        assert (tmp_path / name).read_text() == "not the relay's", name
    assert not (tmp_path / "checkpoints/job/c3").exists()
    assert not (tmp_path / "partial/3").exists()


async def test_two_relays_do_not_share_a_folder(tmp_path: Path) -> None:
    async with relay(data_dir=tmp_path):
        with pytest.raises(KeepstepError, match="another relay uses"):
            DiskTier(tmp_path).open()


# ---- a disk that rots


def file_of(folder: Path, digest: str) -> Path:
    return folder / "chunks" / digest[:2] / digest


async def test_a_flipped_byte_on_disk_is_found_not_served_and_can_be_repaired(tmp_path: Path) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await worker.store(ONE)
    flip(file_of(tmp_path, ONE.digests[1]))
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        assert await worker.chunk(ONE.digests[0]) == ONE.chunks[0]
        assert "no open upload names it" in (await worker.chunk(ONE.digests[1], 410))["detail"]
        assert one.chunks.damaged["disk"] == 1
        assert not await worker.has(ONE.digests[1])
        assert (await worker.show())["checkpoint"]["lacking"] == 1
        await worker.pack(status=410, headers={"Range": f"bytes={CHUNK_BYTES}-"})
        await worker.put(ONE.chunks[1])
        assert await worker.pack() == ONE.pack
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        assert await worker.pack() == ONE.pack


async def test_a_chunk_that_the_disk_cannot_read_is_counted_as_damaged_and_its_file_stays(tmp_path: Path) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await worker.store(ONE)
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        file = file_of(tmp_path, ONE.digests[1])
        make_unreadable(file)
        assert "no open upload names it" in (await worker.chunk(ONE.digests[1], 410))["detail"]
        assert (await worker.show())["checkpoint"]["lacking"] == 1
        assert one.chunks.damaged["disk"] == 1
        await one.chunks.settled()
        assert file.is_symlink(), "the disk may come back"
        await worker.put(ONE.chunks[1])
        assert await worker.pack() == ONE.pack
        await one.chunks._to_write.join()
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        assert await worker.pack() == ONE.pack, "the upload replaced the file"


async def test_a_chunk_that_the_disk_cannot_read_comes_from_the_durable_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    how = {"data_dir": tmp_path / "local", "durable": f"file://{tmp_path}/bucket"}
    async with relay(**how) as one, client(one.address) as worker:
        await worker.begin(kind="durable")
        await worker.manifest(ONE)
        for chunk in ONE.chunks:
            await worker.put(chunk)
        await worker.commit()
        while not one.checkpoints.copies.complete:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.01)
    async with relay(**how) as one, client(one.address) as worker:
        make_unreadable(file_of(tmp_path / "local", ONE.digests[1]))
        assert await worker.chunk(ONE.digests[1]) == ONE.chunks[1]
        make_unreadable(file_of(tmp_path / "local", ONE.digests[2]))
        monkeypatch.setattr(LocalFileSystem, "cat_file", unreadable)  # it seeks first, which a real such file refuses
        await worker.chunk(ONE.digests[2], 410)
        assert one.chunks.damaged == {"disk": 2, "durable": 1}


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda file: os.truncate(file, 10)])
async def test_chunks_that_rotted_while_the_relay_was_away_are_not_committed(tmp_path: Path, damage) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await worker.upload(ONE)
    damage(file_of(tmp_path, ONE.digests[1]))
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        assert "chunk" in (await worker.commit(status=409))["detail"]
        await worker.put(ONE.chunks[1])
        await worker.commit()
        assert await worker.pack() == ONE.pack


@pytest.mark.parametrize("name", ["record", "manifest-0"])
async def test_a_damaged_checkpoint_on_disk_is_left_alone_and_the_others_are_there(tmp_path: Path, name: str) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await worker.store(ONE)
        await worker.store(TWO, "c2", 2)
    damaged = tmp_path / "checkpoints" / "job" / "c1" / name
    flip(damaged)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        assert await worker.list() == ["c2"]
        assert await worker.pack("c2") == TWO.pack
        assert file_of(tmp_path, ONE.digests[0]).exists(), "an operator may repair it"


# ---- full


@pytest.mark.parametrize("small_disk", ["24m"], indirect=True)
async def test_a_full_disk_is_507_what_was_committed_is_safe_and_what_came_is_still_served(small_disk: Path) -> None:
    async with relay(data_dir=small_disk) as one, client(one.address) as worker:
        await worker.store(ONE)
        await worker.begin("c2", 2)
        await worker.manifest(TWO, "c2")
        await worker.put(TWO.chunks[0])
        await one.chunks._to_write.join()
        problem = await worker.put(TWO.chunks[1], 507)
        assert "No space left on device: " in problem["detail"]
        assert "free space there, or remove checkpoints" in problem["detail"]
        assert await worker.chunk(TWO.digests[1]) == TWO.chunks[1], "from memory: a heal goes on"
        await worker.put(TWO.chunks[2])
        assert await worker.pack("c2") == TWO.pack
        await worker.commit("c2", 507)
        assert (await worker.show("c2"))["checkpoint"]["state"] == "uploading"
        assert await worker.pack() == ONE.pack
        await worker.call("DELETE", f"{worker.checkpoints}/c1", 204)
        await worker.commit("c2")
    async with relay(data_dir=small_disk) as one, client(one.address) as worker:
        assert await worker.list() == ["c2"]
        assert await worker.pack("c2") == TWO.pack


async def test_full_memory_without_a_disk_is_503_and_what_was_committed_is_safe(monkeypatch) -> None:
    monkeypatch.setattr("keepstep_relay.api.bulk.ROOM_SECONDS", 0.05)
    async with relay(memory=3 * CHUNK_BYTES) as one, client(one.address) as worker:
        await worker.store(ONE)
        await worker.begin("c2", 2)
        await worker.manifest(TWO, "c2")
        problem = await worker.put(TWO.chunks[0], 503)
        assert "memory tier full" in problem["detail"]
        assert problem["retry_after"] == 1
        assert await worker.pack() == ONE.pack
        await worker.call("DELETE", f"{worker.checkpoints}/c1", 204)
        await worker.put(TWO.chunks[0])
        assert one.chunks.memory.used <= one.chunks.memory.limit


@pytest.mark.parametrize("kind", ["live", "durable"])
async def test_memory_that_is_full_spills_to_disk(tmp_path: Path, kind: str) -> None:
    big = state(4, 6 * CHUNK_BYTES)
    async with relay(data_dir=tmp_path, memory=3 * CHUNK_BYTES) as one, client(one.address) as worker:
        await (worker.store(big) if kind == "live" else store_durable(worker, big, "c1", 1))
        for _ in range(2):
            assert await worker.pack() == big.pack
            assert one.chunks.memory.used <= one.chunks.memory.limit
        assert one.chunks.evicted >= 3
        assert (
            sum(chunk.nbytes for chunk in one.chunks.memory.chunks.values())
            == one.core.inventory.tier_bytes[Tier.MEMORY]
        )
        check_invariants(one.core)
