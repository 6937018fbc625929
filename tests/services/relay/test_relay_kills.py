"""A relay that SIGKILL ends at each point of an upload, and that comes back: both kinds of writers get through."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.managed.durable_upload import Ticket
from keepstep.checkpoint.managed.durable_writer import DurableWriter
from keepstep.connection.http_connection import Endpoint
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.relay_client.relay_requests import RelayCheckpoint
from keepstep_mesh.protocol.manifest import chunk_length, read_envelope
from keepstep_relay.tiers.disk_tier import DiskTier
from keepstep_relay.tiers.durable_tier import DurableTier
from tests.support.services import dying_relay
from tests.support.services.command import START_SECONDS, environment, killed_at_the_end
from tests.support.services.relay_driver import DEADLINE

TIMEOUT = timedelta(seconds=DEADLINE)
DISK = (
    "before a chunk",
    "before a manifest",
    "before the chunks are synced",
    "before the record of the commit",
    dying_relay.RECORD_WRITTEN,
    dying_relay.COMMITTED,
)
OBJECTS = ("before an object of a chunk", "before the objects of the manifests", dying_relay.OBJECT_OF_RECORD)


@asynccontextmanager
async def running(points: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    command = (sys.executable, dying_relay.__file__, str(points), "--log-level", "error", *flags)
    async with killed_at_the_end(*command, env=environment()) as process:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("relay http"), line
        yield process, line.split()[1]


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(value)), "step": value}


def save(url: str, step: int) -> None:
    """Save on two ranks. Raise what one of them raises."""
    place = f"{url}/v1/jobs/saves/checkpoints/step-{step}"
    one = partial(checkpoint.save, state(step), place, world_size=2, step=step, timeout=TIMEOUT)
    with ThreadPoolExecutor(2) as pool:
        for rank in [pool.submit(one, rank=rank) for rank in range(2)]:
            rank.result()


def check_saved(url: str, step: int) -> None:
    into = {"w": torch.zeros(5000), "step": 0}
    checkpoint.load(into, f"{url}/v1/jobs/saves/checkpoints/step-{step}", timeout=TIMEOUT)
    assert into["step"] == step
    assert into["w"].eq(step).all()


def write(writers: list[DurableWriter], url: str, step: int) -> None:
    """Write a durable checkpoint of a group of two ranks."""
    facts = {"step": step, "kind": "durable", "ranks": 2, "quorum_id": 1, "one_producer": True}
    for rank, one in enumerate(writers):
        upload = RelayCheckpoint("managers", f"step-{step}", rank, "a")
        one.offer(Ticket(upload, step, facts, ("a",), 0.5), [Endpoint.of(url, dict)], state(step))
    for one in writers:
        assert one.finish(DEADLINE)
        assert (one.last.error, one.last.step) == ("", step)


@contextmanager
def two_writers() -> Iterator[list[DurableWriter]]:
    with ExitStack() as stack:
        reports: list[tuple[int, int, float, str]] = []
        writers = [
            DurableWriter(
                seconds=DEADLINE,
                newest_wins=False,
                limiter=RateLimiter(None),
                report=lambda *report: reports.append(report),
            )
            for _ in range(2)
        ]
        for one in writers:
            stack.callback(one.close)
        yield writers
        assert [step for step, *_ in reports] == [step for step in range(1, len(reports) // 2 + 1) for _ in writers]
        assert all(nbytes >= 20_000 and seconds > 0 and not error for _, nbytes, seconds, error in reports)


def check_disk(folder: Path) -> set[str]:
    """Check that what is committed on the disk is whole. Return the names."""
    disk, found = DiskTier(folder), set()
    for key, record, manifests in disk.load():
        if record.committed is None:
            continue
        found.add(f"{key.job}/{key.id}")
        assert len(manifests) == record.facts.ranks
        for envelope in map(read_envelope, manifests.values()):
            for number, digest in enumerate(envelope.chunk_digests):
                disk.read(digest, memoryview(bytearray(chunk_length(envelope.pack_bytes, number))))
    return found


def check_objects(folder: Path) -> set[str]:
    """The same in a durable tier."""
    tier, found = DurableTier(f"file://{folder}"), set()
    tier.open()
    for key, _, manifests in tier.load():
        found.add(f"{key.job}/{key.id}")
        for envelope in map(read_envelope, manifests.values()):
            for number, digest in enumerate(envelope.chunk_digests):
                tier.read([key], digest, chunk_length(envelope.pack_bytes, number))
    return found


@pytest.mark.parametrize(
    ("flag", "points", "check"), [("--data-dir", DISK, check_disk), ("--durable", OBJECTS, check_objects)]
)
async def test_a_relay_killed_at_any_point_of_an_upload_has_whole_checkpoints_and_its_writers_get_through(
    tmp_path: Path, fork_server_of_scripts: None, flag: str, points: tuple[str, ...], check: Callable[[Path], set[str]]
) -> None:
    """Relays are killed one after the other, under two ranks of each kind of writer, and started again."""
    folder, armed = tmp_path / "data", tmp_path / "points"
    armed.mkdir()
    place = str(folder) if flag == "--data-dir" else f"file://{folder}"
    bind, writing = "127.0.0.1:0", None
    with two_writers() as writers:
        for step, point in enumerate((*points, ""), 1):
            async with running(armed, "--bind", bind, flag, place) as (process, url):
                bind = url.removeprefix("http://")
                if writing is not None:
                    await writing
                    await asyncio.to_thread(check_saved, url, step - 1)
                if not point:
                    break
                (armed / point).touch()
                both = ((save, url, step), (write, writers, url, step))
                writing = asyncio.gather(*(asyncio.to_thread(*one) for one in both))
                async with asyncio.timeout(DEADLINE):
                    assert await process.wait() == -signal.SIGKILL
            earlier = {f"{job}/step-{number}" for job in ("saves", "managers") for number in range(1, step)}
            assert check(folder) >= earlier
