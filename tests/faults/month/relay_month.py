"""A month of a relay with a small disk: uploads of jobs that train once, and of one job that goes on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from unittest import mock

import msgpack

from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.manifest import Origin, chunk_digest, pack_envelope
from keepstep_relay.api import prometheus
from keepstep_relay.app import Relay
from keepstep_relay.core.checkpoint import MAX_ENDED
from keepstep_relay.core.events import Facts, Key, Kind, Limits, RankReported, RefusedError, Tier
from keepstep_relay.settings import RelaySettings
from keepstep_relay.tiers import chunks as chunk_store
from keepstep_relay.tiers.disk_tier import DiskError
from tests.faults.month.figures import Figures, files_in, folders_in, lines_of
from tests.faults.month.virtual_time import Clock

DAY = 86400.0
DAYS = 30
LONG = "long"
KEEP_DURABLE = 3
CHUNK = 4096
ROOM_SECONDS = 5.0
TRY_DISK_SECONDS = 3600.0
"""In place of 5 s, which would be half a million writes to a real disk."""


async def upload(one: Relay, key: Key, facts: Facts, data: bytes, *, dies: bool = False) -> None:
    """Upload a checkpoint of one rank. ``dies``: its process ends before its chunk is sent."""
    store, chunks = one.checkpoints, one.chunks
    content = msgpack.packb([["tensor", 0], [["uint8", [len(data)], None, 0, 0, None]], [len(data)]])
    digest = chunk_digest(data)
    await store.begin(key, facts)
    await store.put_manifest(key, 0, pack_envelope(Origin(key.id, key.job, facts.step, 1, "r0"), content, digest))
    if dies:
        return
    await chunks.memory.reserve(len(data), ROOM_SECONDS)
    buffer = chunks.memory.buffer(len(data))
    buffer[:] = data
    await chunks.put(digest, buffer, digest)
    await store.report(RankReported(key, 0, None))


async def month(clock: Clock, jobs: int, folder: Path) -> Figures:
    """Return what the relay held. Its clock jumps 20 days ahead on day 10, and back on day 11."""
    limits = Limits(keep_durable=KEEP_DURABLE)
    one = Relay(RelaySettings(data_dir=folder / "data", memory=64 << 20, limits=limits))
    figures = Figures(
        {"refused": 0, "checkpoints": limits.checkpoints, "ended": MAX_ENDED, "orphaned_chunks": 0, "partial_files": 0}
    )
    registry, refused, draw = prometheus.registry(one), 0, random.Random(1)
    with mock.patch.object(chunk_store, "TRY_DISK_SECONDS", TRY_DISK_SECONDS):
        async with one._lifespan():
            for number in range(jobs):
                at = number * DAYS * DAY / jobs
                await asyncio.sleep(max(0.0, at - clock.monotonic))
                data = draw.randbytes(CHUNK)
                uploads = [(Key(f"job-{number}", "c1"), Facts(1, Kind.LIVE, 1, 1), number % 10 == 0)]
                uploads += [(Key(LONG, f"c{number}"), Facts(number, Kind.LIVE, 1, 1), False)]
                uploads += [(Key(LONG, f"d{number}"), Facts(number, Kind.DURABLE, 1, 1), number % 50 == 0)]
                for key, facts, dies in uploads:
                    try:
                        await upload(one, key, facts, data, dies=dies)
                    except (RefusedError, DiskError, KeepstepError):
                        refused += 1
                if number and number % (jobs // DAYS) == 0:
                    day = round(at / DAY)
                    clock.set_by({10: 20 * DAY, 11: -20 * DAY}.get(day, 0.0))
                    await one.chunks.settled()
                    await one.chunks._to_write.join()
                    disk = one.chunks.disk
                    assert disk is not None
                    known = {digest for digest, chunk in one.core.inventory.chunks.items() if Tier.DISK in chunk.tiers}
                    found = {digest for digest, _ in disk.found()}
                    figures.add(
                        day,
                        refused=refused,
                        checkpoints=len(one.core.checkpoints),
                        chunks=len(one.core.inventory.chunks),
                        records=len(one.checkpoints.records),
                        manifests=len(one.checkpoints.manifests),
                        ended=len(one.core.ended),
                        memory_bytes=one.core.inventory.tier_bytes[Tier.MEMORY],
                        files=files_in(folder),
                        folders=folders_in(folder / "data" / "checkpoints"),
                        orphaned_chunks=len(found - known),
                        partial_files=files_in(folder / "data" / "partial"),
                        metric_lines=lines_of(registry),
                    )
    return figures
