"""Groups that have a state and groups that want it, in this process; relays are processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, Self
from urllib.parse import urlsplit

from keepstep.checkpointing import RelayTransport
from tests.support.checkpoints.checkpoint_ends import MIB, Proxy, blank, peer, same
from tests.support.checkpoints.checkpoint_peer import JOB, MINUTE, exchange, state_of
from tests.support.services.relay_driver import DEADLINE, client, metric, relay_process

CHUNK_MIB = 8
Flip = Callable[[int, int, bytes], bytes | None]


@contextmanager
def switched_off() -> Iterator[str]:
    """Yield the address of a relay whose host accepts no connection: clients wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for _ in range(4):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}"


class Groups:
    """Sources ``s0``, ``s1``, ... have the state, joiners ``j0``, ``j1``, ... heal. Close it.

    ``relays`` may be changed at any time. ``others``: sources that are other processes.
    """

    def __init__(
        self, relays: Iterable[str], *, sources: int = 1, joiners: int = 1, mib: int = 32, others: int = 0, **how: Any
    ) -> None:
        self.relays = list(relays)
        self.mib = mib
        self._names = [[f"s{one}" for one in range(sources + others)], [f"j{one}" for one in range(joiners)]]
        self.sources = [self._transport(**how) for _ in range(sources)]
        self.joiners = [self._transport(**how) for _ in range(joiners)]

    def _transport(self, **how: Any) -> RelayTransport[Any]:
        return RelayTransport(MINUTE, lambda: self.relays, hostname="127.0.0.1", **how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.joiners, *self.sources):
            one.shutdown()

    def stage(self, *numbers: int, step: int = 1, state: Any = None) -> None:
        """On these sources; on all without ``numbers``."""
        for number in numbers or range(len(self.sources)):
            self.sources[number].prepare(exchange(f"s{number}", *self._names, step))
            given = state_of(step, self.mib) if state is None else state
            self.sources[number].send_checkpoint([1], step, given, MINUTE)

    def receive(self, number: int = 0, *, step: int = 1, url: str = "", timeout: timedelta = MINUTE, **how: Any) -> Any:
        """Of one joiner, from the first source unless ``url`` says another; the calling thread waits."""
        self.joiners[number].prepare(exchange(f"j{number}", *self._names, step))
        url = url or self.sources[0].metadata()
        return self.joiners[number].recv_checkpoint(0, url, step, timeout, into=blank(self.mib), **how)

    async def receiving(self, number: int = 0, **how: Any) -> Any:
        async with asyncio.timeout(2 * DEADLINE):
            return await asyncio.to_thread(self.receive, number, **how)

    async def heal(self, *numbers: int, step: int = 1, **how: Any) -> None:
        """These joiners at once, all without ``numbers``; each gets the state bit by bit."""
        chosen = numbers or range(len(self.joiners))
        expected = state_of(step, self.mib)
        for got in await asyncio.gather(*(self.receiving(one, step=step, **how) for one in chosen)):
            assert same(got, expected)

    async def uploaded(self, url: str, *, state: str = "committed", step: int = 1) -> None:
        """Returns when the relay has it."""
        async with asyncio.timeout(DEADLINE):
            while (step, state) not in await checkpoints(url):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0.02)


@contextmanager
def before(url: str, change: Flip = lambda _number, _so_far, data: data) -> Any:
    """A proxy in front of a service that counts, or changes, what it answers."""
    parts = urlsplit(url)
    with Proxy((parts.hostname, parts.port), change) as proxy:
        yield proxy


def sent_by(groups: Groups) -> Any:
    """A proxy in front of the first source: what it sends, to whom ``url=proxy.url``."""
    return before(groups.sources[0].metadata())


@asynccontextmanager
async def relay(*flags: str) -> AsyncIterator[str]:
    async with relay_process(*flags) as (_, url):
        yield url


@asynccontextmanager
async def mortal_relay(*flags: str) -> AsyncIterator[tuple[Callable[[], None], str]]:
    """Yield a function that kills it, from any thread, and its address."""
    async with relay_process(*flags) as (process, url):
        yield lambda: os.kill(process.pid, signal.SIGKILL), url
        process.kill() if process.returncode is None else None


async def sent_mib(url: str) -> float:
    """Return what a relay has sent. It counts a chunk after it has sent it, when a joiner may have healed already."""
    async with asyncio.timeout(60):
        while await metric(url, "downloads"):  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.01)
    return await metric(url, "sent_bytes_total") / MIB


async def received_mib(url: str) -> float:
    return await metric(url, "received_bytes_total") / MIB


async def checkpoints(url: str) -> set[tuple[int, str]]:
    """(step, state) of all."""
    async with client(url, job=JOB) as one:
        found = (await one.call("GET", one.checkpoints))["checkpoints"]
    return {(one["step"], one["state"]) for one in found}


async def held(url: str, *, chunks: int) -> list[int]:
    """How many chunks each joiner said that it has, of the relay's only checkpoint."""
    nothing = {"rank": 0, "address": "http://127.0.0.1:1", "has": bytes(-(-chunks // 8)).hex()}
    async with client(url, job=JOB) as one:
        (found,) = (await one.call("GET", one.checkpoints))["checkpoints"]
        answer = await one.call("PUT", f"{one.checkpoints}/{found['id']}/holders/asker", json=nothing)
    return [int(holder["has"], 16).bit_count() for holder in answer["holders"] if holder["name"] != "asker"]


def until(threshold_mib: float, act: Callable[[], object]) -> Callable[[int, int], None]:
    """A ``progress`` that acts once, when so much is here."""
    done = []

    def progress(so_far: int, _total: int) -> None:
        if so_far >= threshold_mib * MIB and not done:
            done.append(so_far)
            act()

    return progress


def flip_once(after_mib: float) -> Flip:
    """Flips a bit of what passes, once, when so much has passed on one connection. ``flipped`` says whether it did."""

    def change(_number: int, so_far: int, data: bytes) -> bytes:
        if so_far > after_mib * MIB and not change.flipped:  # type: ignore[attr-defined]
            change.flipped = True  # type: ignore[attr-defined]
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    change.flipped = False  # type: ignore[attr-defined]
    return change


@contextmanager
def source(me: str, sources: str, joiners: str, url: str, mib: int, uplink: float | str = "") -> Any:
    """A process that has staged, and its address."""
    with peer("relay-source", me, sources, joiners, url, mib, uplink) as process:
        yield process, process.stdout.readline().strip()


async def arrived(url: str, mib: float) -> None:
    """Returns when the relay has received so much."""
    async with asyncio.timeout(DEADLINE):
        while await received_mib(url) < mib:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.01)
