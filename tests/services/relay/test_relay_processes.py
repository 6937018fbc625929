"""A relay with several processes: each serves every route, and the death of one loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import ssl
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from keepstep_mesh.net.http import client_session
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, chunk_digest
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.serving import service
from keepstep_relay.api import bulk
from keepstep_relay.processes import main_process
from keepstep_relay.processes.forwarding import WITHOUT_SLOT
from tests.support.network.certificates import Authority
from tests.support.services.access_table import TOKENS
from tests.support.services.relay_driver import DEADLINE, Client, client, get, metric, raw, relay, relay_process, state

FURTHER = "keepstep_relay.processes.further_process"
CONNECTIONS = 4
"""About two for each of two processes: a connection that has just closed may still count."""


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


async def served(address: str, trusting: ssl.SSLContext) -> set[bytes]:
    """Return the certificates that the processes show to new connections, of which each gets some."""
    host, port = address.removeprefix("https://").split(":")
    found = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(2 * CONNECTIONS):
            _, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
            stack.push_async_callback(writer.wait_closed)
            stack.callback(writer.close)
            found.append(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    return set(found)


async def test_processes_share_a_full_memory_get_new_certificates_and_are_replaced_when_they_freeze(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "ROOM_SECONDS", 0.2)
    monkeypatch.setattr(service, "FILE_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(main_process, "PROCESS_PING_SECONDS", 0.1)
    monkeypatch.setattr(main_process, "MAX_LOST_PINGS", 10_000)  # a process may take long to start here
    authority = Authority(tmp_path)
    certificate, following = (authority.certificate("127.0.0.1") for _ in range(2))
    trusting = TlsFiles(ca=authority.pem).client_context()
    async with relay(processes=2, memory=2 * CHUNK_BYTES + (1 << 20), tls=TlsFiles(cert=certificate)) as one:
        await until(lambda: one.processes == 2)
        async with client_session(tls=trusting) as http, client_session(tls=trusting) as other_http:
            clients = [Client(each, one.address) for each in (http, other_http)]
            for each in clients:
                await each.list()  # its connection; the second one goes to the other process
            full, waiting = state(1), state(2)
            await clients[0].upload(full, "full")
            await clients[0].begin("waiting", 2)
            await clients[0].manifest(waiting, "waiting")
            for each in clients:
                refused = await each.put(waiting.chunks[0], 503)
                assert "memory tier full" in str(refused)
            await clients[1].call("POST", f"{clients[1].checkpoints}/full/abort", 204, json={"reason": "room"})
            for each, chunk in zip((*clients, clients[0]), waiting.chunks, strict=True):
                await each.put(chunk)
            await clients[0].commit("waiting")
            for each in clients:
                assert await each.pack("waiting") == waiting.pack
        (before,) = await served(one.address, trusting)
        certificate.write_bytes(following.read_bytes())
        async with asyncio.timeout(DEADLINE):
            while len(shown := await served(one.address, trusting)) != 1 or before in shown:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # another process has no event to wait for
        (frozen,) = [child for child in psutil.Process().children() if FURTHER in child.cmdline()]
        frozen.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(main_process, "MAX_LOST_PINGS", 2)
        await until(lambda: not frozen.is_running())
        monkeypatch.setattr(main_process, "MAX_LOST_PINGS", 10_000)
        await until(lambda: one.processes == 2)
        assert await served(one.address, trusting) == shown


async def test_slow_clients_delay_other_uploads_of_a_process_only_for_a_time() -> None:
    saved = state(1)
    last, digest = saved.chunks[-1], saved.digests[-1]
    head = f"PUT /v1/chunks/{digest} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(last)}\r\n\r\n".encode()
    async with relay(processes=2) as one, client(one.address) as worker, contextlib.AsyncExitStack() as stack:
        await until(lambda: one.processes == 2)
        await worker.begin()
        await worker.manifest(saved)
        uploads = [
            await stack.enter_async_context(raw(one.address, head + last[:10])) for _ in range(2 * WITHOUT_SLOT + 4)
        ]
        answers = {asyncio.create_task(reader.readuntil(b"}")): writer for reader, writer in uploads}
        done, slow = await asyncio.wait(answers, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
        for refused in done:
            assert refused.result().startswith(b"HTTP/1.1 503")
            assert b"look for clients that send slowly" in refused.result()
        assert done
        for waiting in slow:
            waiting.cancel()
            answers[waiting].close()
        async with client(one.address) as other:
            for number, each in enumerate((worker, other), start=2):
                await each.upload(state(number), f"c{number}", number)


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
            lost = sum(one.status == psutil.CONN_ESTABLISHED for one in further.net_connections("tcp"))
            assert 0 < lost < 2 * CONNECTIONS
            further.send_signal(signal.SIGKILL)
            left = CONNECTIONS
            async with asyncio.timeout(DEADLINE):
                while left + await metric(address, "downloads") != 2 * CONNECTIONS - lost:
                    await asyncio.sleep(0.05)  # as above
                    left = await metric(address, "uploads")
            statuses = []
            for reader, writer in uploads:
                with contextlib.suppress(ConnectionError):
                    writer.write(rest)
                    await writer.drain()
                    if status := await reader.readline():
                        statuses.append(status.split()[1])
            assert len(statuses) == left
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
