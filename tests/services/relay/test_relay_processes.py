"""A relay with several processes: each serves every route, and the death of one loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from keepstep_mesh.net.http import client_session
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, chunk_digest
from keepstep_mesh.security.tls import TlsFiles
from tests.support.network.certificates import Authority
from tests.support.services.access_table import TOKENS
from tests.support.services.relay_driver import DEADLINE, Client, client, get, metric, raw, relay, relay_process, state

FURTHER = "keepstep_relay.processes.further_process"
CONNECTIONS = 4
"""Two for each of two processes."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(0.02)  # as above


async def until_metric(address: str, name: str, value: float) -> None:
    async with asyncio.timeout(DEADLINE):
        while await metric(address, name) != value:  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(0.05)  # as above


async def test_every_process_serves_every_route_with_tokens_and_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = TlsFiles(cert=authority.certificate("127.0.0.1"))
    trusting = TlsFiles(ca=authority.pem).client_context()
    token = TOKENS.worker
    async with relay(processes=2, tokens=TOKENS, tls=tls) as one:
        await until(lambda: one.processes == 2)
        async with client_session(token, tls=trusting) as http, client_session(token, tls=trusting) as other_http:
            first, second = Client(http, one.address), Client(other_http, one.address)
            await first.list()
            await second.list()
            (further,) = [one for one in psutil.Process().children() if FURTHER in one.cmdline()]
            assert len(further.net_connections("tcp")) == 1  # of the two
            for number, (here, there) in enumerate(((first, second), (second, first))):
                saved = state(number)
                name = f"c{number}"
                await here.begin(name)
                await here.manifest(saved, name)
                await here.put(bytes(CHUNK_BYTES), 422, digest=saved.digests[0])
                for chunk in saved.chunks:
                    await here.put(chunk)
                await here.put(saved.chunks[0], 200)
                await here.commit(name)
                for reader in (here, there):
                    assert await reader.pack(name) == saved.pack
                    part = await reader.pack(name, status=206, headers={"Range": f"bytes=5-{CHUNK_BYTES + 4}"})
                    assert part == saved.pack[5 : CHUNK_BYTES + 5]
                    assert [await reader.chunk(digest) for digest in saved.digests] == saved.chunks
                    assert await reader.has(saved.digests[0])
                    assert len(await reader.call("GET", f"{reader.checkpoints}/{name}/manifest")) == len(saved.manifest)
                    await reader.chunk("0" * 32, 404)
                    await reader.put(bytes(CHUNK_BYTES), 409)
                    await reader.begin(name, step=7, status=409)
                assert name in await there.list()
            sizes = 2 * len(state(0).pack) + 2 * CHUNK_BYTES  # with the damaged ones
            assert one.traffic.received_bytes == sizes
        async with client_session(tls=trusting) as nobody, client_session(tls=trusting) as another:
            for http in (nobody, another):
                await Client(http, one.address).call(
                    "PUT", f"/v1/chunks/{'0' * 32}", 401, data=io.BytesIO(bytes(CHUNK_BYTES))
                )


async def test_a_killed_process_loses_only_its_connections_and_ends_with_the_main_one() -> None:
    """Kill a process of a relay in the middle of an upload and of a download; then kill the main one."""
    old, new = state(1), state(2)
    async with relay_process("--processes", "2", "--memory", "128MiB") as (main, address):
        await until_metric(address, "processes", 2)
        process = psutil.Process(main.pid)
        (further,) = process.children()
        descriptors = process.num_fds()
        async with client(address) as worker:
            await worker.store(old, "old", 1)
            await worker.begin("new", 2)
            await worker.manifest(new, "new")
        used = await metric(address, "memory_used_bytes")
        async with contextlib.AsyncExitStack() as stack:
            half, rest = new.chunks[0][: CHUNK_BYTES // 2], new.chunks[0][CHUNK_BYTES // 2 :]
            head = (
                f"PUT /v1/chunks/{new.digests[0]} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {CHUNK_BYTES}\r\n\r\n"
            )
            uploads = [await stack.enter_async_context(raw(address, head.encode() + half)) for _ in range(CONNECTIONS)]
            request = get(f"/v1/chunks/{old.digests[0]}")
            for _ in range(CONNECTIONS):
                await stack.enter_async_context(raw(address, request))
            await until_metric(address, "uploads", CONNECTIONS)
            await until_metric(address, "downloads", CONNECTIONS)
            further.send_signal(signal.SIGKILL)
            await until_metric(address, "uploads", CONNECTIONS / 2)
            await until_metric(address, "downloads", CONNECTIONS / 2)
            statuses = []
            for reader, writer in uploads:
                with contextlib.suppress(ConnectionError):
                    writer.write(rest)
                    await writer.drain()
                    if status := await reader.readline():
                        statuses.append(status.split()[1])
            assert len(statuses) == CONNECTIONS / 2
            assert b"201" in statuses
        await until_metric(address, "processes", 2)
        async with client(address) as worker, client(address) as other:
            for chunk in new.chunks:
                if not await worker.has(chunk_digest(chunk).hex()):
                    await other.put(chunk)
            await worker.commit("new")
            for one in (worker, other):
                assert await one.pack("old") == old.pack
                assert await one.pack("new") == new.pack
        await until_metric(address, "downloads", 0)
        assert await metric(address, "memory_used_bytes") == used + len(new.pack)
        await until(lambda: process.num_fds() <= descriptors)
        (further,) = process.children()
        main.send_signal(signal.SIGKILL)
        await main.wait()
        await until(lambda: not further.is_running() or further.status() == psutil.STATUS_ZOMBIE)
