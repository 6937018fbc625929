"""A relay in the test's loop or in its own process, and a client that sends its HTTP requests by hand."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import numpy as np

from keepstep_mesh.protocol.manifest import CHUNK_BYTES, Origin, chunk_digest, pack_envelope, read_envelope
from keepstep_relay.app import Relay, RelaySettings
from tests.support.services.command import service_process

DEADLINE = 60.0
JOB = "job"
relay_process = partial(service_process, "relay")


@asynccontextmanager
async def relay(**settings: Any) -> AsyncIterator[Relay]:
    one = Relay(RelaySettings(**{"bind": "127.0.0.1:0", **settings}))
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


@asynccontextmanager
async def raw(address: str, request: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that has sent these bytes, with a receive buffer of 1 KiB."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    try:
        writer.write(request)
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def get(path: str) -> bytes:
    """A GET request for ``raw``."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def metric(address: str, name: str) -> float:
    """Return a metric without labels; ``name`` without ``keepstep_relay_``."""
    async with client(address) as one:
        lines = (await one.call("GET", "/metrics")).decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"keepstep_relay_{name} "))


@dataclass(frozen=True)
class State:
    """The bytes of one rank and their manifest."""

    pack: bytes
    manifest: bytes

    @property
    def chunks(self) -> list[bytes]:
        return [self.pack[start : start + CHUNK_BYTES] for start in range(0, len(self.pack), CHUNK_BYTES)]

    @property
    def digests(self) -> list[str]:
        return [chunk_digest(chunk).hex() for chunk in self.chunks]

    @property
    def root(self) -> str:
        return read_envelope(self.manifest).root.hex()


def state(seed: int, size: int = 2 * CHUNK_BYTES + 1000, origin: Origin | None = None) -> State:
    """A state of one tensor of ``size`` random bytes."""
    pack = np.random.default_rng(seed).bytes(size)
    content = msgpack.packb([["tensor", 0], [["uint8", [size], None, 0, 0, None]], [size]])
    digests = b"".join(chunk_digest(pack[at : at + CHUNK_BYTES]) for at in range(0, size, CHUNK_BYTES))
    return State(pack, pack_envelope(origin or Origin("c1", JOB, 1, 1, f"r{seed}"), content, digests))


def flip(file: Path) -> None:
    """Damage a byte in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def make_unreadable(file: Path) -> None:
    """Replace a file by one whose reads fail with EIO, as those of a bad disk do."""
    file.unlink()
    file.symlink_to("/proc/self/mem")  # nothing is mapped at address 0


class Client:
    """A client whose calls assert the status, and that an error is a problem document."""

    def __init__(self, http: aiohttp.ClientSession, address: str, job: str = JOB) -> None:
        self.http = http
        self.address = address
        self.checkpoints = f"/v1/jobs/{job}/checkpoints"

    async def call(self, method: str, path: str, status: int = 200, **how: Any) -> Any:
        async with asyncio.timeout(DEADLINE), self.http.request(method, self.address + path, **how) as answer:
            body = await answer.read()
            assert answer.status == status, (answer.status, body[:1000])
            if status >= 400 and method != "HEAD":
                assert answer.content_type == "application/problem+json"
            return await answer.json(content_type=None) if "json" in answer.content_type and body else body

    async def begin(self, name: str = "c1", step: int = 1, status: int = 201, **body: Any) -> Any:
        return await self.call("POST", self.checkpoints, status, json={"id": name, "step": step, **body})

    async def manifest(self, one: State, name: str = "c1", rank: int = 0, status: int = 201) -> Any:
        path = f"{self.checkpoints}/{name}/manifest?rank={rank}"
        return await self.call("PUT", path, status, data=io.BytesIO(one.manifest))

    async def put(self, chunk: bytes, status: int = 201, digest: str | None = None) -> Any:
        return await self.call(
            "PUT", f"/v1/chunks/{digest or chunk_digest(chunk).hex()}", status, data=io.BytesIO(chunk)
        )

    async def chunk(self, digest: str, status: int = 200, wait: float = 0.0) -> Any:
        return await self.call("GET", f"/v1/chunks/{digest}?wait={wait}", status)

    async def has(self, digest: str) -> bool:
        async with self.http.head(f"{self.address}/v1/chunks/{digest}") as answer:
            return answer.status == 200

    async def commit(self, name: str = "c1", status: int = 200) -> Any:
        return await self.call("POST", f"{self.checkpoints}/{name}/commit", status)

    async def show(self, name: str = "c1", status: int = 200) -> Any:
        return await self.call("GET", f"{self.checkpoints}/{name}", status)

    async def list(self) -> list[str]:
        return [one["id"] for one in (await self.call("GET", self.checkpoints))["checkpoints"]]

    async def pack(self, name: str = "c1", rank: int = 0, status: int = 200, wait: float = 0.0, **how: Any) -> Any:
        return await self.call("GET", f"{self.checkpoints}/{name}/packs/{rank}?wait={wait}", status, **how)

    async def upload(self, one: State, name: str = "c1", step: int = 1, chunks: Iterable[int] | None = None) -> None:
        """Begin an upload and send the missing chunks, or some of the chunks."""
        await self.begin(name, step)
        await self.manifest(one, name)
        parts = one.chunks
        for number in range(len(parts)) if chunks is None else chunks:
            if not await self.has(one.digests[number]):
                await self.put(parts[number])

    async def store(self, one: State, name: str = "c1", step: int = 1) -> None:
        await self.upload(one, name, step)
        await self.commit(name)


async def store_durable(worker: Client, one: State, name: str, step: int, quorum_id: int = 1) -> None:
    await worker.begin(name, step, kind="durable", quorum_id=quorum_id)
    await worker.manifest(one, name)
    for chunk in one.chunks:
        await worker.put(chunk)
    await worker.commit(name)


@asynccontextmanager
async def client(address: str, token: str | None = None, job: str = JOB) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers) as http:
        yield Client(http, address, job)
