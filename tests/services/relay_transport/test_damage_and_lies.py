"""Bytes that are damaged on their way or on a disk, and relays and peers that lie: found, named, had from elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep.checkpointing import TransferError
from keepstep.transfer.relayed.fetch_state import MAX_FAILURES
from keepstep.transfer.relayed.live_checkpoint import LiveCheckpoint
from tests.services.relay_transport.scene import (
    CHUNK_MIB,
    JOB,
    Groups,
    before,
    flip_once,
    mortal_relay,
    received_mib,
    relay,
    sent_by,
    sent_mib,
)
from tests.support.checkpoints.checkpoint_ends import MIB
from tests.support.checkpoints.checkpoint_peer import exchange, state_of
from tests.support.services.relay_driver import Client, client, state

pytestmark = pytest.mark.usefixtures("impatient")

# ---- damage


async def test_a_bit_flipped_between_relay_and_joiner_is_found_named_and_sent_again(caplog, patient):
    change = flip_once(20)
    async with relay() as url:
        with Groups([url], mib=64) as groups, before(url, change) as proxy, sent_by(groups) as source:
            groups.stage()
            await groups.uploaded(url)
            groups.relays = [proxy.url]
            await groups.heal(url=source.url)
            assert change.flipped
            assert source.passed < MIB
            assert "chunk arrived damaged step=1 chunk=" in caplog.text
            assert f"sender={proxy.url}" in caplog.text


async def test_a_relay_that_damages_everything_is_replaced_by_the_source(caplog):
    async with relay() as url:

        def flip(_number: int, so_far: int, data: bytes) -> bytes:
            return data[:-1] + bytes([data[-1] ^ 1]) if so_far > MIB else data

        with Groups([url], mib=64) as groups, before(url, flip) as proxy:
            groups.stage()
            await groups.uploaded(url)
            groups.relays = [proxy.url]
            await groups.heal()
            assert f"sender={proxy.url}" in caplog.text


async def test_a_bit_flipped_between_peers_is_found_named_and_had_from_elsewhere(caplog):
    change = flip_once(4)
    async with relay() as url:
        with (
            Groups([url], joiners=2, mib=128, uplink=96 * MIB) as groups,
            before(groups.joiners[1].metadata(), change) as proxy,
        ):
            groups.joiners[1].metadata = lambda: proxy.url
            step = 0
            while not change.flipped:  # on a busy machine the two may not meet, and all comes from elsewhere
                step += 1
                assert step <= 10
                groups.stage(step=step)
                await groups.heal(step=step)
            assert f"sender={proxy.url}" in caplog.text


async def test_a_bit_flipped_between_source_and_relay_is_refused_there_and_sent_again(caplog, patient):
    changed = []

    def flip(data: bytes) -> bytes:
        if len(data) > 60_000 and not changed:
            changed.append(True)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    async with relay() as url, upstream(url, flip) as proxy:
        with Groups([proxy], mib=32) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.heal(url=source.url)
            await groups.uploaded(url)
            assert changed
            assert source.passed < MIB
            assert "relay failed an upload" in caplog.text
            assert "upload it again" in caplog.text


async def test_a_bit_flipped_on_the_relays_disk_is_not_served_and_the_chunk_comes_from_the_source(tmp_path, patient):
    with Groups([], mib=32) as groups:
        async with mortal_relay("--data-dir", str(tmp_path)) as (_, url):
            groups.relays = [url]
            groups.stage()
            await groups.uploaded(url)
        flip_on_disk(tmp_path)
        async with relay("--data-dir", str(tmp_path)) as url:
            groups.relays = [url]
            with sent_by(groups) as source:
                await groups.heal(url=source.url)
                assert CHUNK_MIB * MIB <= source.passed < (CHUNK_MIB + 1) * MIB


def flip_on_disk(folder: Path) -> None:
    """A bit of one chunk."""
    chunk = max((one for one in folder.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)


@asynccontextmanager
async def upstream(url: str, change: Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """A proxy that changes what clients send."""
    host, port = url.removeprefix("http://").split(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, by: Callable[[bytes], bytes]) -> None:
            try:
                while data := await source.read(1 << 16):
                    sink.write(by(data))
                    await sink.drain()
            except ConnectionError:
                pass
            finally:
                sink.close()

        await asyncio.gather(pump(reader, up_writer, change), pump(up_reader, writer, lambda data: data))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 17)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


# ---- lies of peers


def answer(body: bytes = b"", status: str = "200 OK", length: object = None, head: str = "") -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{head}\r\n".encode() + body


@dataclass
class Liar:
    url: str = ""
    asked: int = 0


@asynccontextmanager
async def says(what: bytes, *, drip: bool = False) -> AsyncIterator[Liar]:
    """Yield a server that answers every request with ``what``; ``drip``: then with a byte now and then, without end."""
    liar = Liar()
    open_connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_connections[task] = writer
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                liar.asked += 1
                if "content-length: " in head:
                    await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                writer.write(what)
                while drip:
                    await asyncio.sleep(0.05)  # far less than anybody's patience
                    writer.write(b"x")
                    await writer.drain()
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            del open_connections[task]

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        liar.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield liar
        for writer in open_connections.values():
            writer.transport.abort()  # its task may wait for a peer that reads no more
        await asyncio.gather(*open_connections)


CHUNK = bytes(CHUNK_MIB * MIB)
LIES = {
    "zeros for a chunk": answer(CHUNK),
    "too few bytes": answer(b"x"),
    "more than it has": answer(CHUNK, length=1 << 50),
    "a number without end": answer(length="9" * 5000),
    "nothing of it": answer(b"", "404 Not Found"),
    "a refusal without end": answer(b"[" * 8192, "500 Oops", length=1 << 50),
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "no end of header": b"x" * 20000,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
async def test_a_peer_that_lies_about_what_it_has_costs_little(lie):
    async with relay() as url, says(lie) as liar:
        with Groups([url], joiners=2, mib=64, uplink=32 * MIB) as groups, claimed(url, liar.url, groups.mib):
            groups.stage()
            await groups.heal(0)
            assert liar.asked


async def test_a_peer_that_serves_others_first_is_asked_again_and_one_that_has_nothing_is_not():
    for status, lasts in (("503 Busy", True), ("404 Not Found", False)):
        async with relay() as url, says(answer(b"", status)) as peer:
            with Groups([url], joiners=2, mib=64, uplink=64 * MIB) as groups, claimed(url, peer.url, groups.mib):
                groups.stage()
                await groups.heal(0)
                assert (peer.asked > MAX_FAILURES) is lasts, (status, peer.asked)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://a..b:80", f"http://{'peer' * 75}:80", "https://h:1"])
async def test_an_address_of_a_peer_that_is_none_costs_nothing(address, caplog):
    caplog.set_level(logging.INFO)
    async with relay() as url:
        with Groups([url], joiners=2, uplink=32 * MIB) as groups, claimed(url, address, groups.mib):
            groups.stage()
            await groups.heal(0)
            assert groups.joiners[0].via == "relay"
            assert await sent_mib(url) > CHUNK_MIB
    assert "another joiner has no valid address" in caplog.text or f"at={address}" in caplog.text


class claimed:  # noqa: N801 - used as a function
    """Says to the relay, as often as it takes, that ``address`` serves all chunks of step 1, a state of ``mib`` MiB."""

    def __init__(self, url: str, address: str, mib: int) -> None:
        self._url, self._address = url, address
        chunks = mib // CHUNK_MIB + 1
        self._has = ((1 << chunks) - 1).to_bytes(-(-chunks // 8), "little").hex()

    def __enter__(self) -> None:
        self._task = asyncio.create_task(self._claim())

    def __exit__(self, *_: object) -> None:
        assert self._task.cancel() or self._task.done()

    async def _claim(self) -> None:
        name = LiveCheckpoint(exchange("j0", ["s0"], ["j0", "j1"])).id
        async with client(self._url, job=JOB) as worker:
            while True:
                path = f"{self._url}{worker.checkpoints}/{name}/holders/liar"
                body = {"rank": 0, "address": self._address, "has": self._has}
                async with worker.http.put(path, json=body) as _:
                    pass
                await asyncio.sleep(0.01)


# ---- lies of relays

PLAN = {"agrees": True, "has_manifest": True, "lacks": "00"}
WRONG = {
    "no JSON": answer(b"<html>"),
    "another kind of JSON": answer(b"[]"),
    "a plan without its fields": answer(b"{}"),
    "a bitmap that is none": answer(json.dumps(PLAN | {"lacks": "zz"}).encode()),
    "a bitmap that is too long": answer(json.dumps(PLAN | {"lacks": "ff" * 5000}).encode()),
    "a bitmap of nothing": answer(json.dumps(PLAN | {"lacks": ""}).encode()),
    "JSON without end": answer(b"[" * 100_000),
    "a length that is a lie": answer(b"{}", length=1 << 50),
    "a number without end": answer(length="9" * 5000),
    "come again in a hundred years": answer(b"", "503 Later", head="Retry-After: 3000000000\r\n"),
    "come again never": answer(b"", "503 Later", head=f"Retry-After: {'9' * 5000}\r\n"),
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "no end of header": b"x" * 20000,
    "nothing": b"",
    "zeros": answer(CHUNK),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
async def test_a_relay_that_talks_nonsense_is_done_without(wrong, caplog):
    async with says(wrong) as liar:
        with Groups([liar.url], joiners=2) as groups:
            groups.stage()
            await groups.heal()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR], "a lie is no fault of ours"


@pytest.mark.parametrize(
    "wrong", [b"HTTP/1.1 200 OK\r\nX: ", answer(b"", length=CHUNK_MIB * MIB)], ids=["head", "body"]
)
async def test_a_relay_whose_answer_has_no_end_is_done_without(wrong):
    async with says(wrong, drip=True) as liar:
        with Groups([liar.url], joiners=2) as groups:
            groups.stage()
            await groups.heal()
            assert {one.via for one in groups.joiners} == {"direct"}
            assert liar.asked


async def test_beside_a_relay_that_talks_nonsense_the_other_one_is_used():
    async with says(answer(b"<html>")) as liar, relay() as url:
        with Groups([liar.url, url], mib=64) as groups:
            groups.stage()
            await groups.heal()
            await groups.uploaded(url)
            assert await received_mib(url) == pytest.approx(64, abs=0.1), "the part of the other one too"


# ---- another state under the same name


async def test_another_state_at_the_relay_under_the_same_name_is_told_and_not_taken(caplog):
    async with relay() as url:
        with Groups([url], joiners=2) as groups:
            name = LiveCheckpoint(exchange("s0", ["s0"], ["j0", "j1"])).id
            async with client(url, job=JOB) as worker:
                await put_another(worker, name)
            groups.stage()
            await groups.heal()
        assert "the states of the groups differ" in caplog.text


async def put_another(worker: Client, name: str) -> None:
    another = state(7)
    await worker.begin(name, 1, kind="live", ranks=1, quorum_id=1)
    path = f"{worker.checkpoints}/{name}/plan"
    await worker.call("POST", path, json={"rank": 0, "producer": "s9", "root": another.root})
    await worker.manifest(another, name)


async def test_when_two_sources_differ_each_joiner_gets_that_of_its_own_source(caplog):
    async with relay() as url:
        with Groups([url], sources=2, joiners=2) as groups:
            groups.stage(0)
            other = state_of(1, 32)
            other["user"]["model"]["weights"] += 1
            groups.stage(1, state=other)
            got = await asyncio.gather(groups.receiving(0), groups.receiving(1, url=groups.sources[1].metadata()))
            assert got[0]["user"]["model"]["weights"].equal(state_of(1, 32)["user"]["model"]["weights"])
            assert got[1]["user"]["model"]["weights"].equal(other["user"]["model"]["weights"])
        assert "the states of the groups differ" in caplog.text


async def test_a_source_that_has_no_snapshot_says_why_at_once():
    async with relay() as url:
        with Groups([url]) as groups:
            groups.sources[0].refuse_checkpoint([1], 1, "its state cannot be stored")
            with pytest.raises(TransferError, match="its state cannot be stored"):
                await groups.receiving()
