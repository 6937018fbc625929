"""Saves that overwrite a checkpoint at a relay: readers get the earlier one whole, or the later one."""

from __future__ import annotations

import asyncio
import io
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointAborted, CheckpointError, CheckpointNotFound, StoredCheckpoint
from keepstep.checkpoint.loading import load_leaves, open_reader
from keepstep.checkpoint.saving import open_target, pack_of, save_facts
from keepstep.relay_client.uploading import Packed
from keepstep.state.flattening import flatten
from keepstep.state.local_parts import local_parts
from keepstep.state.state_manifest import build_manifest
from keepstep_mesh.protocol.manifest import Origin, read_envelope
from keepstep_mesh.security.tokens import Tokens
from keepstep_relay.core.events import Key, Limits
from keepstep_relay.tiers.durable_tier import DurableError, DurableTier
from tests.services.relay.test_relay_durable import files_below, until
from tests.services.relay.test_relay_kills import DISK, OBJECTS, check_disk, check_objects, running
from tests.support.services import dying_relay
from tests.support.services.relay_driver import DEADLINE, JOB, client, relay

TIMEOUT = timedelta(seconds=DEADLINE)
ID = f"/v1/jobs/{JOB}/checkpoints/c"
SIZE = 3_000_000
"""Values of the tensor: two chunks."""
FIRST = Key(JOB, "c")


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((SIZE,), float(value)), "step": value}


def save(place: str, value: int, ranks: int = 1, **how: Any) -> None:
    """Save on all ranks. Raise what one of them raises."""
    one = partial(checkpoint.save, state(value), place, world_size=ranks, timeout=TIMEOUT, overwrite=True, **how)
    with ThreadPoolExecutor(ranks) as pool:
        for rank in [pool.submit(one, rank=rank) for rank in range(ranks)]:
            rank.result()


def loaded(place: str) -> int:
    """Return the value of the state there, which is whole."""
    into = {"w": torch.zeros(SIZE), "step": 0}
    checkpoint.load(into, place, timeout=TIMEOUT)
    assert into["w"].eq(into["step"]).all()
    return into["step"]


@pytest.fixture(params=["memory", "disk"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"memory_checkpoints": 5} if request.param == "memory" else {"data_dir": tmp_path / "data"}


async def test_each_save_replaces_the_one_before_also_with_other_ranks_and_in_the_background(settings):
    async with relay(**settings, limits=Limits(reading_seconds=0.0)) as one, client(one.address) as asking:
        place = one.address + ID
        for value, ranks in ((1, 1), (2, 3), (3, 2), (4, 1)):
            await asyncio.to_thread(save, place, value, ranks)
            assert await asyncio.to_thread(loaded, place) == value
        saves = partial(checkpoint.async_save, timeout=TIMEOUT, overwrite=True)
        for value in (5, 6):
            await asyncio.to_thread(lambda value=value: saves(state(value), place).result(DEADLINE))
            assert await asyncio.to_thread(loaded, place) == value
        assert await asking.list() == ["c"]
        assert (await asking.show("c"))["checkpoint"]["version"] == 5
        with pytest.raises(CheckpointError, match=r"already exists: .*use another id, or pass overwrite=True"):
            await asyncio.to_thread(checkpoint.save, state(7), place)
        await until(lambda: list(one.core.checkpoints) == [FIRST.at(5)])
        kept = set(one.core.checkpoints[FIRST.at(5)].digests())
        assert set(one.core.inventory.chunks) == kept
        if "data_dir" in settings:
            names = {digest.hex() for digest in kept}
            await until(lambda: {file.name for file in files_below(settings["data_dir"] / "chunks")} == names)
            await until(lambda: len(files_below(settings["data_dir"] / "checkpoints")) == 2)


def two_ranks(place: str) -> list[Any]:
    """Return two ranks that have begun a save."""
    ranks = [open_target(place, save_facts(n, 2, 0, "durable", overwrite=True), timeout=TIMEOUT) for n in range(2)]
    for rank in ranks:
        rank.begin()
    return ranks


async def test_the_earlier_one_is_whole_until_the_commit_and_after_a_failure(settings):
    async with relay(**settings) as one:
        place = one.address + ID

        def save_and_fail() -> None:
            save(place, 1)
            for _ in range(2):
                storing, failing = two_ranks(place)
                storing.store(pack_of(local_parts(flatten(state(2)))))
                assert loaded(place) == 1
                failing.fail("no memory")
                with pytest.raises(CheckpointAborted, match="rank 1 failed: no memory"):
                    storing.commit()
                for rank in (storing, failing):
                    rank.close()
                assert loaded(place) == 1
            save(place, 4, 2)
            assert loaded(place) == 4

        await asyncio.to_thread(save_and_fail)


async def test_of_two_saves_at_once_the_first_wins_and_the_other_gets_a_named_error(settings):
    async with relay(**settings) as one:
        place = one.address + ID

        def save_both() -> None:
            save(place, 1)
            facts = save_facts(0, 1, 0, "durable", overwrite=True)
            targets = [open_target(place, facts, timeout=TIMEOUT) for _ in range(3)]
            for target in targets[:2]:
                target.begin()
            first, second, late = targets
            first._upload.announce(packed(first, 2))
            with pytest.raises(CheckpointError, match=r"rank 0 of .* has another state already, .* of another save"):
                second.store(pack_of(local_parts(flatten(state(3)))))
            second.fail("another state")
            assert loaded(place) == 1
            first.store(pack_of(local_parts(flatten(state(2)))))
            first.commit()
            with pytest.raises(CheckpointError, match="has another state already"):
                second.store(pack_of(local_parts(flatten(state(3)))))
            late.begin()  # a save after the other
            late.store(pack_of(local_parts(flatten(state(4)))))
            first.commit()  # it was committed, also if another has replaced it since
            for target in targets:
                target.close()
            assert loaded(place) == 4

        await asyncio.to_thread(save_both)


def packed(target: Any, value: int) -> Packed:
    """Return the state as the target uploads it."""
    pack = pack_of(local_parts(flatten(state(value))))
    hasher = pack.digests()
    origin = Origin("c", JOB, 0, 0, target._facts.producer)
    manifest = build_manifest(origin, pack.content_bytes, hasher.digests, hasher.parts)
    return Packed(manifest, read_envelope(manifest), pack.chunk)


async def test_a_reader_of_the_earlier_one_finishes_with_its_bytes_or_gets_a_named_error(settings):
    async with relay(**settings) as one:
        place = one.address + ID
        loop = asyncio.get_running_loop()

        async def drop() -> None:
            one.core.checkpoints[FIRST].read_until = 0.0
            one.chunks.deadline_changed.set()
            await until(lambda: FIRST not in one.core.checkpoints)

        def read_beside() -> None:
            save(place, 1)
            reader = open_reader(place, timeout=TIMEOUT)
            stored = StoredCheckpoint(reader)
            save(place, 2)
            assert loaded(place) == 2
            into = {"w": torch.zeros(SIZE), "step": 0}
            load_leaves(into, stored, strict=True)
            assert into["w"].eq(1).all()
            asyncio.run_coroutine_threadsafe(drop(), loop).result(DEADLINE)
            with pytest.raises(CheckpointNotFound, match="overwritten by a later save"):
                load_leaves({"w": torch.zeros(SIZE)}, stored, strict=False)
            reader.close()
            assert loaded(place) == 2

        await asyncio.to_thread(read_beside)


async def test_plain_torch_never_reads_files_of_two_versions():
    async with relay(memory_checkpoints=5) as one, client(one.address) as reader:
        items = []
        for value in (1, 2):
            await asyncio.to_thread(save, one.address + ID, value)
            # as torch loads it; the bytes are those of the relay that this test started
            metadata = pickle.loads(await reader.call("GET", f"{ID}/.metadata"))
            items.append(next(at for index, at in metadata.storage_data.items() if index.fqn == "w"))
        for value, at in enumerate(items, 1):
            data = (await reader.call("GET", f"{ID}/{at.relative_path}"))[at.offset : at.offset + at.length]
            assert torch.load(io.BytesIO(data), weights_only=True).eq(value).all()
        await reader.call("DELETE", ID, 204)
        for at in items:
            await reader.call("GET", f"{ID}/{at.relative_path}", 410)
        assert not one.core.checkpoints


async def test_a_worker_may_not_overwrite_what_it_may_not_delete():
    worker, admin = "worker-token-0123456789", "admin-token-0123456789"
    async with relay(memory_checkpoints=5, tokens=Tokens(worker=worker, admin=admin)) as one:
        place = one.address + ID

        def save_as_each() -> None:
            save(place, 1, token=worker)
            with pytest.raises(CheckpointError, match=r"a worker token may not overwrite it: .* takes an admin token"):
                save(place, 2, token=worker)
            save(place, 3, token=admin)
            into = {"step": 0}
            checkpoint.load(into, place, token=worker, timeout=TIMEOUT)
            assert into["step"] == 3

        await asyncio.to_thread(save_as_each)


@pytest.mark.parametrize(
    ("flag", "points", "check"), [("--data-dir", DISK[-3:], check_disk), ("--durable", OBJECTS[-2:], check_objects)]
)
async def test_a_relay_killed_during_a_save_that_overwrites_has_the_earlier_one_or_the_later_one(
    tmp_path: Path, fork_server_of_scripts: None, flag: str, points: tuple[str, ...], check: Callable[[Path], set[str]]
) -> None:
    folder, armed = tmp_path / "data", tmp_path / "points"
    armed.mkdir()
    place = str(folder) if flag == "--data-dir" else f"file://{folder}"
    bind = "127.0.0.1:0"
    async with running(armed, "--bind", bind, flag, place) as (_, url):
        bind = url.removeprefix("http://")
        await asyncio.to_thread(save, url + ID, 1, 2)
    for value, point in enumerate(points, 2):
        async with running(armed, "--bind", bind, flag, place) as (process, url):
            (armed / point).touch()
            writing = asyncio.create_task(asyncio.to_thread(save, url + ID, value, 2))
            async with asyncio.timeout(DEADLINE):
                assert await process.wait() == -signal.SIGKILL
        assert check(folder)
        on_disk = {"data_dir": folder} if flag == "--data-dir" else {"durable": place}
        async with relay(**on_disk) as one:
            expected = value if point == dying_relay.COMMITTED else value - 1
            assert await asyncio.to_thread(loaded, one.address + ID) == expected
        async with running(armed, "--bind", bind, flag, place) as (_, url):
            await writing
            assert await asyncio.to_thread(loaded, url + ID) == value


async def test_the_durable_tier_keeps_the_earlier_copy_until_it_has_the_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write_chunk = threading.Event(), DurableTier.write_chunk

    def slow(tier: DurableTier, key: Key, digest: bytes, data: memoryview) -> None:
        if key.version:
            go_on.wait(DEADLINE)
        write_chunk(tier, key, digest, data)

    monkeypatch.setattr(DurableTier, "write_chunk", slow)
    objects = tmp_path / "objects"
    tiers = {"data_dir": tmp_path / "data", "durable": f"file://{objects}"}
    async with relay(**tiers, limits=Limits(reading_seconds=0.0)) as one:
        for value in (1, 2):
            await asyncio.to_thread(save, one.address + ID, value)
            await until(lambda: FIRST in one.checkpoints.copies._stored)
            if value == 1:
                await until(lambda: FIRST in one.checkpoints.copies.complete)
        await until(lambda: FIRST not in one.core.checkpoints)
        await one.chunks.settled()
        await one.checkpoints.copies.forget(FIRST)
        assert check_objects(objects) == {f"{JOB}/c"}
        shutil.copytree(objects, tmp_path / "copy")
        async with relay(durable=f"file://{tmp_path / 'copy'}") as other:
            assert await asyncio.to_thread(loaded, other.address + ID) == 1
        go_on.set()
        copies = one.checkpoints.copies
        await until(lambda: copies.complete == copies._stored == {FIRST.at(1)})  # nothing is deleted any more
        assert check_objects(objects) == {f"{JOB}/c~1"}
    async with relay(durable=tiers["durable"]) as other:
        assert await asyncio.to_thread(loaded, other.address + ID) == 2


async def test_a_deletion_leaves_no_earlier_copy_that_would_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, write_chunk = threading.Event(), DurableTier.write_chunk

    def fails(tier: DurableTier, key: Key, digest: bytes, data: memoryview) -> None:
        if key.version:
            broken.set()
            raise DurableError("no space")
        write_chunk(tier, key, digest, data)

    monkeypatch.setattr(DurableTier, "write_chunk", fails)
    objects = tmp_path / "objects"
    tiers = {"data_dir": tmp_path / "data", "durable": f"file://{objects}"}
    async with relay(**tiers, limits=Limits(reading_seconds=0.0)) as one, client(one.address) as asking:
        for value in (1, 2):
            await asyncio.to_thread(save, one.address + ID, value)
            await until(lambda: FIRST in one.checkpoints.copies.complete or broken.is_set())
        await until(lambda: FIRST not in one.core.checkpoints)
        await asking.call("DELETE", ID, 204)
        assert not check_objects(objects)
    async with relay(**tiers) as one, client(one.address) as asking:
        assert not await asking.list()
