"""The durable tier of a relay: what is copied there, found again, and deleted."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import aiohttp
import fsspec
import pytest

from keepstep_cli.doctor import probes
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, DIGEST_BYTES
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import Tokens
from keepstep_relay.core.events import Key, Limits
from keepstep_relay.tiers import chunks, durable_copies
from keepstep_relay.tiers.durable_tier import DurableError, DurableTier
from tests.support.services.relay_driver import (
    DEADLINE,
    client,
    flip,
    metric,
    relay,
    state,
    store_durable,
)

ONE, TWO = state(1), state(2)
SMALL = 64 << 20


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not true():  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.01)


def files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, also while others delete folders there."""
    return [Path(place, name) for place, _, names in os.walk(folder) for name in names]


@pytest.mark.parametrize("size", [1000, 2 * CHUNK_BYTES])
async def test_a_checkpoint_that_is_removed_while_it_is_copied_leaves_nothing_and_the_next_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    writing, go_on, write_chunk = threading.Event(), threading.Event(), DurableTier.write_chunk

    def slow(tier: DurableTier, key: Key, digest: bytes, data: memoryview) -> None:
        writing.set()
        go_on.wait(DEADLINE)
        write_chunk(tier, key, digest, data)

    monkeypatch.setattr(DurableTier, "write_chunk", slow)
    async with (
        relay(data_dir=tmp_path / "local", durable=f"file://{tmp_path}/bucket") as one,
        client(one.address) as worker,
    ):
        await store_durable(worker, state(3, size), "c1", 1)
        await asyncio.to_thread(writing.wait, DEADLINE)
        removing = asyncio.create_task(worker.call("DELETE", f"{worker.checkpoints}/c1", 204))
        await until(lambda: not one.core.checkpoints)
        go_on.set()
        await removing
        await store_durable(worker, TWO, "c2", 2)
        await until(lambda: Key("job", "c2") in one.checkpoints.copies.complete)
    await until(lambda: not files_below(tmp_path / "bucket" / "job" / "c1"))
    assert files_below(tmp_path / "bucket" / "job" / "c2")


async def test_a_durable_copy_that_could_not_be_deleted_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_tier: DurableTier, _key: Key) -> None:
        raise DurableError("it is away")

    monkeypatch.setattr(durable_copies, "COPY_BACKOFF", Backoff(first=0.01, most=0.01))
    async with relay(durable=f"file://{tmp_path}/bucket") as one, client(one.address) as worker:
        await store_durable(worker, ONE, "c1", 1)
        with monkeypatch.context() as failing:
            failing.setattr(DurableTier, "forget", away)
            await worker.call("DELETE", f"{worker.checkpoints}/c1", 204)
            await until(lambda: one.checkpoints.copies.trouble is not None)
        await until(lambda: not files_below(tmp_path / "bucket"))
        await until(lambda: one.checkpoints.copies.trouble is None)
        assert not files_below(tmp_path / "bucket")


@pytest.mark.parametrize("scheme", ["file", "memory"])
async def test_files_of_others_beside_a_durable_checkpoint_stay_and_are_named(
    tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{scheme}://{tmp_path}/bucket"
    files, place = fsspec.core.url_to_fs(url)
    digest = "0a" * DIGEST_BYTES
    foreign = ["notes", "manifest-0.old", "chunks/notes", f"chunks/{digest}.old", "mine/record", "mine/chunks/x"]
    async with relay(durable=url) as one, client(one.address) as worker:
        await store_durable(worker, ONE, "c1", 1)
        await until(lambda: Key("job", "c1") in one.checkpoints.copies.complete)
        for name in foreign:
            files.makedirs(f"{place}/job/c1/{name}".rsplit("/", 1)[0], exist_ok=True)
            files.pipe(f"{place}/job/c1/{name}", b"not the relay's")
        await worker.call("DELETE", f"{worker.checkpoints}/c1", 204)
        await until(lambda: "left files in the durable tier" in caplog.text)
        found = [path.removeprefix(f"{place}/job/c1/") for path in files.find(f"{place}/job/c1")]
        assert sorted(found) == sorted(foreign)
        await store_durable(worker, TWO, "c1", 2, quorum_id=2)
        await until(lambda: Key("job", "c1") in one.checkpoints.copies.complete)
    async with relay(durable=url) as one, client(one.address) as worker:
        assert await worker.pack() == TWO.pack


async def test_a_durable_tier_that_fails_is_no_commit(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("a file in the way")
    async with relay(durable=f"file://{tmp_path}/bucket/below") as one, client(one.address) as worker:
        await worker.begin(kind="durable")
        await worker.manifest(TWO)
        for chunk in TWO.chunks:
            await worker.put(chunk)
        assert "bucket" in (await worker.commit(status=503))["detail"]
        assert (await worker.show())["checkpoint"]["state"] == "uploading"
        assert await worker.pack() == TWO.pack
        assert "bucket" in (await probes._probe(worker.http, "relay", one.address, TlsFiles())).not_ready, (
            "keepstep doctor says so"
        )


async def test_an_object_store_that_fails_for_a_moment_costs_a_retry_and_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, write_chunk = iter((True, True)), DurableTier.write_chunk

    def flaky(tier: DurableTier, key: Key, digest: bytes, data: memoryview) -> None:
        if next(failures, False):
            raise DurableError("slow down")
        write_chunk(tier, key, digest, data)

    monkeypatch.setattr(DurableTier, "write_chunk", flaky)
    monkeypatch.setattr(durable_copies, "DURABLE_WRITE_BACKOFF", Backoff(first=0.01, most=0.01))
    async with relay(durable=f"file://{tmp_path}/bucket") as one, client(one.address) as worker:
        await store_durable(worker, ONE, "c1", 1)
        assert (await worker.show())["checkpoint"]["durable"]
        assert await metric(one.address, "durable_behind_seconds") == 0.0


async def test_a_relay_with_memory_only_keeps_durable_checkpoints_if_it_was_told_to() -> None:
    limits = Limits(keep_durable=2, reading_seconds=0.0)
    async with relay(memory_checkpoints=2, limits=limits) as one, client(one.address) as worker:
        for step in (1, 2, 3):
            await store_durable(worker, state(step), f"c{step}", step)
        await store_durable(worker, state(9), "of-a-script", 9, quorum_id=0)
        assert await worker.list() == ["c2", "c3", "of-a-script"]
        assert (
            'keepstep_relay_durable_commit_step{job="job"} 3.0'
            in (await worker.call("GET", "/metrics")).decode().splitlines()
        )


async def test_a_durable_checkpoint_is_found_again_after_everything_local_was_lost(tmp_path: Path) -> None:
    local, url = tmp_path / "local", f"file://{tmp_path}/bucket"
    async with relay(data_dir=local, durable=url) as one, client(one.address) as worker:
        await worker.begin(kind="durable")
        await worker.manifest(ONE)
        for chunk in ONE.chunks:
            await worker.put(chunk)
        await worker.commit()
        await worker.store(TWO, "live", 2)
        async with asyncio.timeout(DEADLINE):
            while not (await worker.show())["checkpoint"]["durable"]:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
    shutil.rmtree(local)
    async with relay(data_dir=local, durable=url) as one, client(one.address) as worker:
        assert await worker.list() == ["c1"], "live ones are not copied"
        assert await worker.pack() == ONE.pack
        await worker.call("DELETE", f"{worker.checkpoints}/c1", 204)
    assert not files_below(tmp_path / "bucket")


async def test_a_copy_that_was_not_completed_is_no_checkpoint_and_a_damaged_chunk_is_not_served(tmp_path: Path) -> None:
    url, bucket = f"file://{tmp_path}/bucket", tmp_path / "bucket" / "job"
    for number, one_state in enumerate((ONE, TWO), 1):
        async with relay(durable=url) as one, client(one.address) as worker:
            await worker.begin(f"c{number}", number, kind="durable")
            await worker.manifest(one_state, f"c{number}")
            for chunk in one_state.chunks:
                await worker.put(chunk)
            await worker.commit(f"c{number}")
            assert (bucket / f"c{number}" / "record").exists(), "without a disk a commit waits for the durable tier"
    (bucket / "c1" / "record").unlink()
    flip(bucket / "c2" / "chunks" / TWO.digests[1])
    async with relay(durable=url, memory=SMALL) as one, client(one.address) as worker:
        assert await worker.list() == ["c2"]
        assert await worker.chunk(TWO.digests[0]) == TWO.chunks[0]
        await worker.chunk(TWO.digests[1], 410)
        assert one.chunks.damaged["durable"] == 1


async def test_a_copy_of_an_earlier_checkpoint_of_the_same_name_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise DurableError("it is away")

    local, url, key = tmp_path / "local", f"file://{tmp_path}/bucket", Key("job", "c1")
    async with relay(data_dir=local, durable=url) as one, client(one.address) as worker:
        await store_durable(worker, ONE, "c1", 1)
        await until(lambda: key in one.checkpoints.copies.complete)
        with monkeypatch.context() as patch:
            patch.setattr(DurableTier, "forget", away)
            patch.setattr(DurableTier, "_write", away)
            await worker.call("DELETE", f"{worker.checkpoints}/c1", 204)
            await store_durable(worker, TWO, "c1", 1)
            await one.stop()
    async with relay(data_dir=local, durable=url) as one:
        await until(lambda: key in one.checkpoints.copies.complete)
    shutil.rmtree(local)
    async with relay(data_dir=local, durable=url) as one, client(one.address) as worker:
        assert await worker.pack() == TWO.pack


async def test_a_begin_of_a_committed_checkpoint_that_only_the_durable_tier_has_writes_nothing(tmp_path: Path) -> None:
    local, url = tmp_path / "local", f"file://{tmp_path}/bucket"
    async with relay(data_dir=local, durable=url) as one, client(one.address) as worker:
        await store_durable(worker, ONE, "c1", 1, quorum_id=0)
        await until(lambda: Key("job", "c1") in one.checkpoints.copies.complete)
    shutil.rmtree(local)
    async with relay(data_dir=local, durable=url) as one, client(one.address) as worker:
        assert (await worker.begin("c1", 1, 200, kind="durable"))["state"] == "committed"
    async with relay(data_dir=local, durable=url) as one:
        assert one.chunks.disk is not None
        assert one.chunks.disk.unreadable == set()


async def test_a_chunk_that_the_bucket_has_lost_is_missed_at_the_start_and_one_that_the_disk_has_is_copied_again(
    tmp_path: Path,
) -> None:
    local, url, bucket = tmp_path / "local", f"file://{tmp_path}/bucket", tmp_path / "bucket" / "job" / "c1"
    async with relay(data_dir=local, durable=url) as one, client(one.address) as worker:
        await store_durable(worker, ONE, "c1", 1)
        await until(lambda: Key("job", "c1") in one.checkpoints.copies.complete)
    chunk = bucket / "chunks" / ONE.digests[1]
    chunk.unlink()
    async with relay(data_dir=local, durable=url) as one:
        await until(lambda: Key("job", "c1") in one.checkpoints.copies.complete)
        assert chunk.read_bytes() == ONE.chunks[1]
    shutil.rmtree(local)
    chunk.write_bytes(ONE.chunks[1][:100])
    async with relay(data_dir=local, durable=url) as one, client(one.address) as worker:
        assert (await worker.show())["checkpoint"]["lacking"] == 1
        assert await metric(one.address, "damaged_checkpoints") == 1
    (bucket / "manifest-0").write_bytes(b"damaged")
    async with relay(durable=url) as one, client(one.address) as worker:
        listed = await worker.call("GET", worker.checkpoints)
        assert (listed["checkpoints"], listed["unreadable"]) == ([], ["c1"])
        assert await metric(one.address, "damaged_checkpoints") == 1


async def test_a_chunk_stays_while_the_object_store_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with relay(durable=f"file://{tmp_path}/bucket") as one, client(one.address) as worker:
        await store_durable(worker, ONE, "c1", 1)
    async with relay(durable=f"file://{tmp_path}/bucket") as one, client(one.address) as worker:
        there, away = tmp_path / "bucket" / "job" / "c1" / "chunks", tmp_path / "away"
        shutil.move(there, away)
        there.write_text("a file in the way: NotADirectoryError")
        await worker.chunk(ONE.digests[0], 503)
        there.unlink()
        shutil.move(away, there)
        assert await worker.chunk(ONE.digests[0]) == ONE.chunks[0]


@pytest.mark.parametrize("small_disk", ["3m"], indirect=True)
async def test_an_idle_relay_notices_that_its_disk_is_full_and_doctor_needs_no_token_to_learn_it(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "TRY_DISK_SECONDS", 0.1)
    tokens = Tokens(worker="worker-token-of-the-test")
    async with relay(data_dir=small_disk / "data", tokens=tokens) as one, aiohttp.ClientSession() as http:
        assert (await probes._probe(http, "relay", one.address, TlsFiles())).not_ready == ""
        big = small_disk / "big"
        with pytest.raises(OSError, match="No space left"), big.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        await until(lambda: one.not_ready() is not None)
        assert "cannot write to" in (await probes._probe(http, "relay", one.address, TlsFiles())).not_ready
        big.unlink()
        await until(lambda: one.not_ready() is None)


@pytest.mark.parametrize("small_disk", ["24m"], indirect=True)
async def test_a_relay_is_ready_again_when_the_disk_that_refused_a_chunk_has_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "TRY_DISK_SECONDS", 0.1)
    async with relay(data_dir=small_disk / "data") as one, client(one.address) as worker:
        big = small_disk / "big"
        big.write_bytes(bytes(20 << 20))
        await worker.begin("c1", 1)
        await worker.manifest(ONE)
        await worker.put(ONE.chunks[0])
        await until(lambda: one.chunks.disk_trouble is not None)
        assert one.not_ready() is not None, "it accepts no checkpoint"
        big.unlink()
        await until(lambda: one.not_ready() is None)
        assert one.chunks.disk_trouble is None
