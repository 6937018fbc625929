"""A relay from the outside: uploads, cut-through, dedup, ranges, holders, retention, metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest

from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.core.events import Limits
from keepstep_relay.core.invariants import check_invariants
from tests.support.services.lighthouse_driver import eventually
from tests.support.services.relay_driver import DEADLINE, Client, client, get, raw, relay, relay_process, state

ONE, TWO = state(1), state(2)
NOWHERE = "0" * 32


async def test_a_committed_upload_is_read_back_bit_for_bit(tmp_path) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        assert (await worker.begin())["state"] == "begun"
        plan = await worker.manifest(ONE)
        assert (plan["agrees"], plan["chunks"], plan["lacking"], plan["lacks"]) == (True, 3, 3, "07")
        assert (await worker.show())["checkpoint"]["state"] == "planned"
        for chunk in ONE.chunks:
            await worker.put(chunk)
        assert (await worker.show())["checkpoint"]["state"] == "uploading"
        committed = await worker.commit()
        assert (committed["state"], committed["bytes"], committed["on_disk"]) == ("committed", len(ONE.pack), 3)
        assert await worker.call("GET", f"{worker.checkpoints}/c1/manifest") == ONE.manifest
        assert await worker.pack() == ONE.pack
        for digest, chunk in zip(ONE.digests, ONE.chunks, strict=True):
            assert await worker.chunk(digest) == chunk
        check_invariants(one.core)


async def test_only_missing_chunks_are_uploaded() -> None:
    async with relay() as one, client(one.address) as worker:
        await worker.store(ONE)
        received = one.traffic.received_bytes
        await worker.begin("c2", 2)
        plan = await worker.manifest(ONE, "c2")
        assert (plan["lacking"], plan["lacks"]) == (0, "00")
        assert all([await worker.has(digest) for digest in ONE.digests])
        await worker.put(ONE.chunks[0], 200)
        await worker.commit("c2")
        assert one.traffic.received_bytes == received
        assert one.traffic.deduplicated_bytes >= len(ONE.pack)


async def test_equal_replicas_share_an_upload_and_another_state_is_told() -> None:
    async with relay() as one, client(one.address) as worker:
        path = f"{worker.checkpoints}/c1/plan"
        await worker.begin()
        assert (await worker.begin(status=200))["id"] == "c1", "the second group joins"
        await worker.begin(step=2, status=409)
        first = await worker.call("POST", path, json={"producer": "r0", "root": ONE.root})
        assert (first["agrees"], first["has_manifest"]) == (True, False)
        await worker.manifest(TWO, status=409)
        await worker.manifest(ONE)
        second = await worker.call("POST", path, json={"producer": "r1", "root": ONE.root})
        assert (second["agrees"], second["has_manifest"], second["lacks"]) == (True, True, "07")
        third = await worker.call("POST", path, json={"producer": "r2", "root": TWO.root})
        assert (third["agrees"], third["root"]) == (False, ONE.root)
        (rank,) = (await worker.show())["by_rank"]
        assert rank["roots"] == {"r0": ONE.root, "r1": ONE.root, "r2": TWO.root}


async def test_the_last_rank_to_report_commits(tmp_path) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await worker.begin(ranks=2, kind="durable")
        result = f"{worker.checkpoints}/c1/result"
        for rank, of in enumerate((ONE, TWO)):
            await worker.manifest(of, rank=rank)
            assert (await worker.call("POST", result, 409, json={"rank": rank}))["detail"].startswith(
                "3 missing chunks"
            )
            for chunk in of.chunks:
                await worker.put(chunk)
            answer = await worker.call("POST", result, json={"rank": rank})
        assert answer["state"] == "committed"
        assert await worker.pack(rank=0) == ONE.pack
        assert await worker.pack(rank=1) == TWO.pack
        await worker.pack(rank=2, status=404)


async def test_a_rank_that_failed_aborts_for_all_with_its_reason() -> None:
    async with relay() as one, client(one.address) as worker:
        await worker.upload(ONE, chunks=[0])
        answer = await worker.call("POST", f"{worker.checkpoints}/c1/result", 410, json={"error": "out of memory"})
        assert "out of memory" in answer["detail"]
        assert "out of memory" in (await worker.commit(status=410))["detail"]
        await worker.chunk(ONE.digests[0], 404)
        assert one.chunks.memory.used == 0


# ---- cut-through


async def test_a_reader_that_began_before_the_writer_gets_all_bytes() -> None:
    async with relay() as one, client(one.address) as worker, asyncio.TaskGroup() as readers:
        manifest = readers.create_task(
            worker.call("GET", f"{worker.checkpoints}/c1/manifest?wait=60"), name="reader of the manifest"
        )
        pack = readers.create_task(worker.pack(wait=60))
        chunk = readers.create_task(_chunk_of(worker, 2))
        await eventually(lambda: one.chunks.notifier.waiters == 3)
        await worker.begin()
        await worker.manifest(ONE)
        assert await manifest == ONE.manifest
        for part in reversed(ONE.chunks):
            await worker.put(part)
        assert await chunk == ONE.chunks[2]
        assert await pack == ONE.pack


async def _chunk_of(worker: Client, number: int) -> bytes:
    await worker.call("GET", f"{worker.checkpoints}/c1/manifest?wait=60")
    return await worker.chunk(ONE.digests[number], wait=60)


async def test_a_reader_gets_an_error_when_its_chunk_does_not_come() -> None:
    async with relay() as one, client(one.address) as worker:
        await worker.chunk(NOWHERE, 404)
        await worker.call("GET", f"{worker.checkpoints}/c1/manifest?wait=0.01", 404)
        await worker.begin()
        problem = await worker.call("GET", f"{worker.checkpoints}/c1/manifest?wait=0.01", 503)
        assert problem["retry_after"] == 1
        await worker.manifest(ONE)
        async with worker.http.get(f"{one.address}/v1/chunks/{ONE.digests[0]}?wait=0.01") as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        await worker.pack(status=503)


async def test_a_reader_gets_an_error_when_the_upload_ends() -> None:
    async with relay() as one, client(one.address) as worker:
        await worker.begin()
        await worker.manifest(ONE)
        async with asyncio.TaskGroup() as readers:
            readers.create_task(worker.chunk(ONE.digests[0], 410, wait=60))
            readers.create_task(worker.pack(status=410, wait=60))
            await eventually(lambda: one.chunks.notifier.waiters == 2)
            await worker.call("POST", f"{worker.checkpoints}/c1/abort", 204, json={"reason": "gave up"})
        assert "gave up" in (await worker.show(status=410))["detail"]
        assert one.chunks.notifier.waiters == 0


async def test_a_pack_that_cannot_be_completed_breaks_off_and_says_nothing_wrong() -> None:
    async with relay() as one, client(one.address) as worker:
        await worker.upload(ONE, chunks=[0])
        async with worker.http.get(f"{one.address}{worker.checkpoints}/c1/packs/0?wait=0.05") as answer:
            assert (answer.status, answer.content_length) == (200, len(ONE.pack))
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()


async def test_a_slow_reader_does_not_slow_a_fast_one() -> None:
    async with relay() as one, client(one.address) as worker:
        await worker.store(ONE)
        async with raw(one.address, get(f"{worker.checkpoints}/c1/packs/0")) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            assert one.traffic.downloads == 1, "it has begun, and takes nothing more"
            for _ in range(5):
                assert await worker.pack() == ONE.pack
            assert one.traffic.downloads == 1
            assert await reader.readexactly(len(ONE.pack)) == ONE.pack


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    big = state(9, 8 * CHUNK_BYTES)
    async with relay() as one, client(one.address) as worker:
        await worker.store(big)
        patient = one.settings
        one.settings = replace(patient, body_timeout=0.2)
        async with raw(one.address, get(f"{worker.checkpoints}/c1/packs/0")):
            await eventually(lambda: one.traffic.cut_off == 1)
        one.settings = patient
        await eventually(lambda: one.traffic.downloads == 0)
        assert await worker.pack() == big.pack, "others are served"


# ---- ranges


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=5-99", 5, 99),
        (f"bytes={CHUNK_BYTES - 3}-{CHUNK_BYTES + 3}", CHUNK_BYTES - 3, CHUNK_BYTES + 3),
        (f"bytes=1-{2 * CHUNK_BYTES}", 1, 2 * CHUNK_BYTES),
        (f"bytes={CHUNK_BYTES}-", CHUNK_BYTES, len(ONE.pack) - 1),
        ("bytes=-10", len(ONE.pack) - 10, len(ONE.pack) - 1),
        (f"bytes=7-{10**15}", 7, len(ONE.pack) - 1),
        (f"bytes=-{10**15}", 0, len(ONE.pack) - 1),
    ],
)
async def test_a_range_of_a_pack(asked: str, first: int, last: int) -> None:
    async with relay() as one, client(one.address) as worker:
        await worker.store(ONE)
        path = f"{one.address}{worker.checkpoints}/c1/packs/0"
        async with worker.http.get(path, headers={"Range": asked}) as answer:
            assert answer.status == 206
            assert answer.headers["Content-Range"] == f"bytes {first}-{last}/{len(ONE.pack)}"
            assert await answer.read() == ONE.pack[first : last + 1]


@pytest.mark.parametrize(
    "asked",
    [
        f"bytes={len(ONE.pack)}-",
        "bytes=5-4",
        "bytes=-0",
        "bytes=-",
        "bytes=0-1,3-4",
        "lines=1-2",
        "bytes=a-b",
        "bytes=--1",
    ],
)
async def test_a_range_out_of_bounds_is_refused(asked: str) -> None:
    async with relay() as one, client(one.address) as worker:
        await worker.store(ONE)
        await worker.pack(status=416, headers={"Range": asked})
        assert await worker.pack() == ONE.pack


async def test_an_empty_state_is_a_checkpoint_too() -> None:
    empty = state(3, 0)
    async with relay() as one, client(one.address) as worker:
        await worker.store(empty)
        assert await worker.pack() == b""
        await worker.pack(status=416, headers={"Range": "bytes=0-0"})


# ---- who has what, what is kept


async def test_holders_and_the_relays_own_bitmap() -> None:
    async with relay() as one, client(one.address) as worker:
        await worker.upload(ONE, chunks=[0, 2])
        path = f"{worker.checkpoints}/c1/holders"
        body = {"address": "http://10.0.0.1:7", "has": "02"}
        await worker.call("PUT", f"{path}/r7", json=body)
        assert await worker.call("GET", path) == {
            "rank": 0,
            "chunks": 3,
            "relay": "05",
            "holders": [{"name": "r7", "address": "http://10.0.0.1:7", "has": "02"}],
        }
        await worker.call("PUT", f"{path}/r7", 409, json={**body, "has": "0202"})
        await worker.call("PUT", f"{path}/r7", 400, json={**body, "has": "xx"})
        await worker.call("PUT", f"{path}/r7", 400, json={**body, "address": "nowhere"})


async def test_a_holder_that_says_nothing_more_is_forgotten() -> None:
    async with relay(limits=Limits(holder_seconds=0.1)) as one, client(one.address) as worker:
        await worker.store(ONE)
        path = f"{worker.checkpoints}/c1/holders"
        await worker.call("PUT", f"{path}/r7", json={"address": "http://10.0.0.1:7", "has": "02"})
        async with asyncio.timeout(DEADLINE):
            while (found := await worker.call("GET", path))["holders"]:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
        assert (found["relay"], found["holders"]) == ("07", [])


async def test_old_ones_go_and_the_list_says_what_is_there(tmp_path) -> None:
    limits = Limits(keep_live=1, reading_seconds=0.0)
    async with relay(data_dir=tmp_path, limits=limits) as one, client(one.address) as worker:
        await worker.store(ONE, "c1", 1)
        await worker.store(TWO, "c2", 2)
        assert await worker.list() == ["c2"]
        answer = await worker.call("GET", worker.checkpoints)
        assert answer["latest"]["id"] == "c2"
        assert (await worker.call("GET", f"{worker.checkpoints}?step=1"))["checkpoints"] == []
        await worker.pack("c1", status=410)
        await one.chunks.settled()
        assert len(list(tmp_path.glob("chunks/*/*"))) == 3
        await worker.call("DELETE", f"{worker.checkpoints}/c2", 204)
        assert not list(tmp_path.glob("chunks/*/*"))
        assert not list(tmp_path.glob("checkpoints/*/*"))
        assert await worker.list() == []


async def test_an_upload_whose_rank_vanished_is_aborted() -> None:
    async with relay(limits=Limits(upload_seconds=1.0)) as one, client(one.address) as worker:
        await worker.upload(ONE, chunks=[0])
        problem = await worker.call(
            "GET", f"{worker.checkpoints}/c1/packs/0?wait=60", 410, headers={"Range": "bytes=-1"}
        )
        assert "no open upload names it" in problem["detail"]
        assert "no sign of life of rank 0" in (await worker.show(status=410))["detail"]


async def test_a_durable_checkpoint_needs_a_tier_that_lasts() -> None:
    async with relay() as one, client(one.address) as worker:
        assert "--data-dir" in (await worker.begin(status=409, kind="durable"))["detail"]


async def test_metrics_say_what_happened(tmp_path) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        await worker.store(ONE)
        await worker.pack()
        wrong = state(5)
        await worker.begin("c2", 2)
        await worker.manifest(wrong, "c2")
        await worker.put(ONE.chunks[0], 422, digest=wrong.digests[0])
        lines = (await worker.call("GET", "/metrics")).decode().splitlines()
        seen = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
        assert {
            "keepstep_relay_received_bytes_total": len(ONE.pack) + CHUNK_BYTES,
            "keepstep_relay_sent_bytes_total": len(ONE.pack),
            'keepstep_relay_damaged_chunks_total{where="upload"}': 1,
            'keepstep_relay_tier_bytes{tier="memory"}': len(ONE.pack),
            'keepstep_relay_tier_bytes{tier="disk"}': len(ONE.pack),
            'keepstep_relay_checkpoints{state="committed"}': 1,
            'keepstep_relay_checkpoints{state="planned"}': 1,
            "keepstep_relay_waits": 0,
            "keepstep_relay_downloads": 0,
        }.items() <= seen.items()


async def test_200_heals_leave_nothing_behind(tmp_path) -> None:
    limits = Limits(keep_live=1, reading_seconds=0.0)
    async with relay(data_dir=tmp_path, limits=limits) as one, client(one.address) as worker:
        for step in range(200):
            new = state(1000 + step, 3000)
            await worker.store(new, f"c{step}", step)
            assert await worker.pack(f"c{step}") == new.pack
        await one.chunks.settled()
        check_invariants(one.core)
        assert await worker.list() == ["c199"]
        assert len(one.core.inventory.chunks) == len(one.chunks.memory.chunks) == len(one.checkpoints.manifests) == 1
        assert one.chunks.memory.used == len(new.pack) + len(new.manifest)
        assert len(list(tmp_path.glob("chunks/*/*"))) == len(list(tmp_path.glob("checkpoints/*/*"))) == 1
        assert len(one.chunks._verified) == len(one.checkpoints._written) - 1 == 1
        assert not one.chunks.locks._entries


async def test_memory_of_a_chunk_is_used_again_but_never_while_it_is_being_sent() -> None:
    async with relay_process() as (_, address), client(address) as worker:
        await worker.store(ONE)
        async with raw(address, get(f"/v1/chunks/{ONE.digests[0]}")) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            await worker.call("DELETE", f"{worker.checkpoints}/c1", 204)
            await worker.store(TWO, "c2")
            assert await reader.readexactly(CHUNK_BYTES) == ONE.chunks[0]
            assert await worker.pack("c2") == TWO.pack


async def test_live_states_that_come_fast_one_after_the_other_all_find_room() -> None:
    async with relay(memory=64 << 20) as one, client(one.address) as worker:
        for step in range(6):
            kept = state(step, 20 << 20)
            await worker.store(kept, f"c{step}", step)
            assert await worker.pack(f"c{step}") == kept.pack
        assert {key.id for key in one.checkpoints.records} == {key.id for key in one.core.checkpoints} >= {"c4", "c5"}
        assert len(one.core.checkpoints) == 3
