"""Hostile input: a clear error, bounded memory, nothing lost, and the next request is served."""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import pytest_asyncio
from yarl import URL

from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, read_envelope, root_digest
from keepstep_relay import node
from keepstep_relay.api import bulk, downloads
from keepstep_relay.app import Relay
from keepstep_relay.core.events import Limits
from keepstep_relay.core.invariants import check_invariants
from tests.support.services.lighthouse_driver import eventually
from tests.support.services.relay_driver import DEADLINE, Client, client, raw, relay, state

ONE, TWO = (state(seed, CHUNK_BYTES + 1000) for seed in (1, 2))
GOLDEN = Path(__file__).parents[2] / "support" / "checkpoints" / "golden"


@asynccontextmanager
async def begun(**settings: Any) -> AsyncIterator[tuple[Relay, Client]]:
    """A relay with one committed checkpoint and one that has begun; both are as they were at the end."""
    limits = Limits(checkpoints=3, chunks=18, ranks=4, keep_live=0)
    async with relay(limits=limits, **settings) as one, client(one.address) as worker:
        await worker.store(ONE)
        await worker.upload(TWO, "c2", 2, chunks=[1])
        await one.chunks._to_write.join()
        used = one.chunks.memory.used
        yield one, worker
        check_invariants(one.core)
        assert await worker.pack() == ONE.pack
        assert (await worker.show("c2"))["checkpoint"]["lacking"] == 1
        assert one.chunks.memory.used == used, "reserved memory was given back"
        assert one.traffic.uploads == one.traffic.downloads == one.chunks.notifier.waiters == 0


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[tuple[Relay, Client]]:
    async with begun() as made:
        yield made


@pytest_asyncio.fixture
async def scene_with_disk(tmp_path: Path) -> AsyncIterator[tuple[Relay, Client]]:
    async with begun(data_dir=tmp_path / "data") as made:
        yield made


def content(tree: Any = ("tensor", 0), rows: Any = ((),), regions: Any = (10,)) -> bytes:
    packed: bytes = msgpack.packb([tree, rows, regions])
    return packed


def forged(body: bytes | None = None, digests: bytes = bytes(16), **fields: Any) -> bytes:
    """A manifest whose root digest is right, whatever else it says."""
    body = content() if body is None else body
    manifest = {
        "format": "keepstep-state",
        "version": 1,
        "origin": ["", "", 0, 0, ""],
        "content": body,
        "chunk_bytes": CHUNK_BYTES,
        "chunk_digest": "xxh3-128",
        "chunks": digests,
        "root_digest": "blake2b-256",
        "root": root_digest(body, digests) if isinstance(body, bytes) and isinstance(digests, bytes) else b"",
    }
    packed: bytes = msgpack.packb(manifest | fields)
    return packed


MANIFESTS = {
    "nothing": (b"", "not msgpack"),
    "garbage": (b"\xff" * 100, "no keepstep manifest|not msgpack"),
    "a pickle": (pickle.dumps({"a": [1] * 100}), "no keepstep manifest|not msgpack"),
    "another version": (forged(version=2), "version 2"),
    "other chunks": (forged(chunk_bytes=1), "chunk_bytes"),
    "a wrong root": (forged(root=bytes(32)), "root digest does not fit"),
    "no bytes": (forged(chunks="abc"), "must be bytes"),
    "too few digests": (forged(digests=b""), "do not fit a pack of 10 bytes"),
    "half a digest": (forged(digests=bytes(8)), "do not fit"),
    "a pack without end": (forged(content(regions=[1 << 46, 1 << 46])), "too large"),
    "a negative region": (forged(content(regions=[-1])), "integer in"),
    "a region of text": (forged(content(regions=["x"])), "integer in"),
    "regions that are no list": (forged(content(regions=7)), "must be list"),
    "a list of two": (forged(msgpack.packb([1, 2])), "list of tree"),
    "content that goes on": (forged(content() + b"\xc0"), "something follows"),
    "content that is cut off": (forged(content()[:-1]), "not msgpack"),
    "deep nesting": (forged(b"\x93" + b"\x91" * 100_000 + b"\xc0"), "not msgpack"),
    "lists that say that they are long": (forged(b"\x93" + b"\xdd\x7f\xff\xff\xff" * 500), "not msgpack"),
    "a manifest that says it is long": (b"\xdf\x7f\xff\xff\xff", "not msgpack"),
    "no origin": (forged(origin=[]), "origin has 0 fields; expected at least 5"),
    "an origin of other types": (forged(origin=[1, 2, 3, 4, 5]), "must be str"),
}


@pytest.mark.parametrize("name", MANIFESTS)
async def test_a_hostile_manifest_is_refused_with_what_is_wrong(scene, name: str) -> None:
    _, worker = scene
    manifest, words = MANIFESTS[name]
    await worker.begin("c3", 3)
    path = f"{worker.checkpoints}/c3/manifest"
    problem = await worker.call("PUT", path, 400, data=io.BytesIO(manifest))
    with pytest.raises(ManifestError, match=words):
        read_envelope(manifest)
    assert problem["detail"]
    assert (await worker.show("c3"))["by_rank"] == []


@pytest.mark.parametrize(
    "body",
    [
        b"\x93\xdd" + (4_000_000).to_bytes(4, "big") + b"\x90" * 4_000_000 + b"\x90\x90",
        b"\x93\x90\xdd" + (4_000_000).to_bytes(4, "big") + b"\x80" * 4_000_000 + b"\x90",
        b"\x93\x90" + b"\xdd\x00\x3f\xff\xff" * 1000 + b"\x90",
    ],
)
def test_a_manifest_bomb_takes_little_more_memory_than_it_is_long(body: bytes) -> None:
    manifest = forged(body, b"")
    tracemalloc.start()
    try:
        with contextlib.suppress(ManifestError):
            read_envelope(manifest)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(manifest) + (1 << 20)
    finally:
        tracemalloc.stop()


async def test_the_manifest_of_a_real_state_is_taken(scene_with_disk) -> None:
    _, worker = scene_with_disk
    manifest, pack = ((GOLDEN / f"state-v1.{part}").read_bytes() for part in ("manifest", "pack"))
    await worker.begin("c3", 3)
    await worker.call("PUT", f"{worker.checkpoints}/c3/manifest", 201, data=io.BytesIO(manifest))
    await worker.put(pack)
    await worker.commit("c3")
    assert await worker.pack("c3") == pack
    await worker.call("DELETE", f"{worker.checkpoints}/c3", 204)


NAMES = ["..", ".", "%2e%2e%2fetc", "a%2fb", "a%00b", "-x", "x" * 129, "%E2%82%AC", "a%0ab", "a b"]


def all_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_that_leads_elsewhere_is_refused(scene_with_disk, name: str, tmp_path: Path) -> None:
    one, worker = scene_with_disk
    before = all_of(tmp_path)
    for method, path in (
        ("GET", f"{worker.checkpoints}/{name}"),
        ("GET", f"/v1/jobs/{name}/checkpoints"),
        ("DELETE", f"{worker.checkpoints}/{name}"),
        ("GET", f"/v1/chunks/{name}"),
        ("PUT", f"{worker.checkpoints}/c2/holders/{name}"),
    ):
        url = URL(one.address + path, encoded=True)
        body = {"address": "http://a:1", "has": "00"} if "holders" in path else None
        async with worker.http.request(method, url, json=body) as answer:
            assert answer.status in (400, 404, 405), (method, path, answer.status)
    decoded = name.replace("%2e", ".").replace("%2f", "/").replace("%00", "\0").replace("%0a", "\n")
    await worker.begin(decoded.replace("%E2%82%AC", "€"), status=400)
    assert all_of(tmp_path) == before


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"id": "c9"},
        {"id": "c9", "step": "1"},
        {"id": "c9", "step": -1},
        {"id": "c9", "step": 2**60},
        {"id": "c9", "step": 1, "kind": "other"},
        {"id": "c9", "step": 1, "ranks": 0},
        {"id": "c9", "step": 1, "ranks": True},
        {"id": "c9", "step": 1, "quorum_id": -1},
        {"id": "c9", "step": 1, "more": 1},
        {"id": 7, "step": 1},
        {"id": "c9", "step": 1.5},
        [],
    ],
)
async def test_a_beginning_that_makes_no_sense_is_refused(scene, body: Any) -> None:
    _, worker = scene
    before = await worker.list()
    await worker.call("POST", worker.checkpoints, 400, json=body)
    await worker.call("POST", worker.checkpoints, 400, data=b'{"id": ')
    await worker.call("POST", worker.checkpoints, 413, data=io.BytesIO(b" " * 2_000_000))
    assert await worker.list() == before


async def test_a_chunk_with_other_bytes_than_its_digest_is_never_visible(scene_with_disk) -> None:
    one, worker = scene_with_disk
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(worker.chunk(TWO.digests[0], 503, wait=0.3))
        for _ in range(3):
            problem = await worker.put(ONE.chunks[0], 422, digest=TWO.digests[0])
        assert "upload it again" in problem["detail"]
        await reader
    assert not await worker.has(TWO.digests[0])
    assert one.chunks.damaged["upload"] == 3


async def test_a_chunk_that_nothing_needs_or_of_another_length_is_refused(scene) -> None:
    _, worker = scene
    await worker.put(state(7).chunks[0], 409)
    await worker.put(TWO.chunks[0][:-1], 400, digest=TWO.digests[0])
    await worker.put(TWO.chunks[0] + b"x", 413, digest=TWO.digests[0])
    await worker.put(b"", 400, digest=TWO.digests[0])
    await worker.put(zlib.compress(TWO.chunks[0], 1)[:100], 400, digest=TWO.digests[0])
    assert not await worker.has(TWO.digests[0])


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(DEADLINE):
        return int((await reader.readline()).split()[1])


def put_head(digest: str, *lines: str) -> bytes:
    return "\r\n".join([f"PUT /v1/chunks/{digest} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([], 411),
        (["Transfer-Encoding: chunked"], 411),
        (["Content-Length: -5"], 400),
        (["Content-Length: 99999999999999999999"], 400),
        (["Content-Length: 999999999999999999"], 413),
        (["Content-Length: 1"], 400),
        ([f"Content-Length: {CHUNK_BYTES}", "Content-Length: 5"], 400),
        ([f"Content-Length: {CHUNK_BYTES}", "Content-Encoding: gzip"], 400),
    ],
)
async def test_a_length_that_lies_is_refused_before_the_body(scene, lines: list[str], status: int) -> None:
    one, _ = scene
    async with raw(one.address, put_head(TWO.digests[0], *lines)) as (reader, _writer):
        assert await status_of(reader) == status


async def test_a_body_that_ends_early_is_forgotten(scene_with_disk) -> None:
    one, worker = scene_with_disk
    used = one.chunks.memory.used
    head = put_head(TWO.digests[0], f"Content-Length: {CHUNK_BYTES}")
    async with raw(one.address, head + TWO.chunks[0][:100_000]):
        await eventually(lambda: one.traffic.uploads == 1)
    await eventually(lambda: one.traffic.uploads == 0)
    assert one.chunks.memory.used == used
    assert not await worker.has(TWO.digests[0])


async def test_a_body_that_trickles_is_cut_off(scene) -> None:
    one, _ = scene
    one.settings = replace(one.settings, body_timeout=0.3)
    for path in ("chunk", "manifest"):
        head = put_head(TWO.digests[0], f"Content-Length: {CHUNK_BYTES}")
        if path == "manifest":
            head = head.replace(f"/v1/chunks/{TWO.digests[0]}".encode(), b"/v1/jobs/job/checkpoints/c2/manifest?rank=0")
        async with raw(one.address, head) as (reader, writer):
            asked = asyncio.create_task(status_of(reader))
            while not asked.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)  # a byte arrives always, and never all of it
            assert await asked == 408
            async with asyncio.timeout(DEADLINE):
                await reader.read()
    one.settings = replace(one.settings, body_timeout=60.0)


async def test_too_much_is_507_or_413_and_says_what_to_do(scene) -> None:
    one, worker = scene
    assert "has 5 ranks (limit 4)" in (await worker.begin("c3", 3, 507, ranks=5))["detail"]
    await worker.begin("c3", 3)
    problem = await worker.begin("c4", 4, 507)
    assert "keepstep checkpoint rm" in problem["detail"]
    body = content(regions=[15 * CHUNK_BYTES])
    many = forged(body, b"".join(bytes([number]) * 16 for number in range(15)))
    problem = await worker.call("PUT", f"{worker.checkpoints}/c3/manifest", 507, data=io.BytesIO(many))
    assert "15 more chunks" in problem["detail"]
    head = (
        f"PUT {worker.checkpoints}/c3/manifest HTTP/1.1\r\nHost: [::1]\r\n"
        f"Content-Length: {MAX_MANIFEST_BYTES + 1}\r\n\r\n"
    )
    async with raw(one.address, head.encode()) as (reader, _writer):
        assert await status_of(reader) == 413


async def test_too_many_at_once_are_asked_to_come_again(scene, monkeypatch: pytest.MonkeyPatch) -> None:
    _, worker = scene
    monkeypatch.setattr(bulk, "MAX_UPLOADS", 0)
    monkeypatch.setattr(downloads, "MAX_DOWNLOADS", 0)
    assert "too many downloads" in (await worker.chunk(ONE.digests[0], 503))["detail"]
    assert "too many uploads" in (await worker.put(TWO.chunks[0], 503))["detail"]
    monkeypatch.setattr(node, "MAX_WAITS", 0)
    await worker.call("GET", f"{worker.checkpoints}/c9/manifest?wait=1", 503)
    monkeypatch.setattr(node, "MAX_MANIFESTS_COMING", 0)
    await worker.manifest(TWO, "c2", status=503)
    monkeypatch.undo()


@pytest.mark.parametrize(
    "query", ["wait=x", "wait=-1", "wait=nan", "rank=x", "rank=-1", "rank=1e9", "rank=99999999999"]
)
async def test_a_number_that_is_none_is_refused(scene, query: str) -> None:
    _, worker = scene
    problem = await worker.call("GET", f"{worker.checkpoints}/c1/manifest?{query}", 400)
    assert repr(query.partition("=")[2]) in problem["detail"]


async def test_a_flag_that_is_neither_0_nor_1_is_refused(scene) -> None:
    _, worker = scene
    problem = await worker.call("POST", f"{worker.checkpoints}?again=x", 400, json={"id": "c2", "step": 2})
    assert problem["detail"] == "invalid again 'x': expected 0 or 1"


async def test_a_wait_is_bounded(scene) -> None:
    one, worker = scene
    one.settings = replace(one.settings, max_wait=0.05)
    problem = await worker.chunk(TWO.digests[0], 503, wait=1e9)
    assert "timed out" in problem["detail"]


async def test_random_bytes_never_stop_the_relay(scene_with_disk) -> None:
    one, worker = scene_with_disk
    for seed in range(20):
        async with raw(one.address, state(100 + seed, 3000).pack + b"\r\n\r\n") as (reader, _writer):
            async with asyncio.timeout(DEADLINE):
                await reader.read()
    assert (await worker.call("GET", "/healthz"))["status"] == "ok"
