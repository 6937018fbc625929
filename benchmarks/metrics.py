"""Measure the metrics service: its rate of records per core, its memory after a simulated day, the cost of a sender.

    python benchmarks/metrics.py ingest --groups 1000 --steps 10 --seconds 10
    python benchmarks/metrics.py memory --groups 1000
    python benchmarks/metrics.py sender

``ingest``: a service process with a disk, and senders that each send a second's steps per batch, as fast as the service
answers. The figure is the processor time of the service, because the machine may have other work. ``memory``: the state
machine in this process. It receives a day of records at the resolution that each part keeps, which fills every ring as
steps of any rate do, and each group is lost and comes back ten times. ``sender``: the cost for a process that reports
steps of 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import msgpack
import psutil

from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol.telemetry_records import BatchHead, EventRecord, StepRecord, pack_batch, pack_record
from keepstep_mesh.telemetry.record_sender import Sender
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.machine import MetricsCore
from keepstep_metrics.history.timeseries.series import LEVELS

STEP_SECONDS = 0.005


def step_record(t: float, number: int) -> StepRecord:
    return StepRecord(
        t=t,
        step=number,
        quorum_id=7,
        committed=True,
        participants=8,
        seconds=0.1,
        quorum_seconds=0.001,
        busy_seconds=0.09,
        values={"loss": 1.5},
    )


@asynccontextmanager
async def service() -> AsyncIterator[tuple[str, psutil.Process]]:
    """A metrics service with a disk: its address and its process."""
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "keepstep_cli", "metrics", "--bind", "127.0.0.1:0", "--data-dir", folder)
        quiet = ("--log-level", "error")
        started = await asyncio.create_subprocess_exec(*command, *quiet, stdout=asyncio.subprocess.PIPE)
        try:
            assert started.stdout is not None
            yield (await started.stdout.readline()).decode().split()[1], psutil.Process(started.pid)
        finally:
            started.terminate()
            await started.wait()


async def ingest(groups: int, steps: int, seconds: int) -> dict[str, float]:
    async with (
        service() as (url, process),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        process.cpu_affinity([max(os.sched_getaffinity(0))])
        slots = asyncio.Semaphore(100)
        waits: list[float] = []

        async def send(group: int, second: int) -> None:
            first, now = second * steps + 1, time.time()
            told = [pack_record(step_record(now + at / steps, first + at)) for at in range(steps)]
            head = BatchHead(source="worker", name=f"g{group}:1", job="job", boot=f"b{group}", first=first)
            body = pack_batch(head, told)
            async with slots:
                began = time.perf_counter()
                async with http.post(f"{url}/v1/ingest", data=body) as answer:
                    assert answer.status == 200, await answer.text()
                waits.append(time.perf_counter() - began)

        began, before = time.perf_counter(), process.cpu_times()
        for second in range(seconds):
            await asyncio.gather(*(send(group, second) for group in range(groups)))
        took, after = time.perf_counter() - began, process.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        told = groups * steps * seconds
        return {
            "records": told,
            "cpu_seconds_per_second_of_data": round(cpu / seconds, 3),
            "records_per_cpu_second": round(told / cpu),
            "records_per_second": round(told / took),
            "answer_p99_ms": round(1000 * sorted(waits)[int(0.99 * len(waits))], 1),
            "rss_mib": round(process.memory_info().rss / 2**20, 1),
        }


def day() -> Iterator[float]:
    """Yield the seconds of a day at which each group ends a step."""
    at, end = 0.0, 86400.0
    while at < end:
        yield at
        at += next(width for width, limit in LEVELS if end - at <= width * limit)


def memory(groups: int) -> dict[str, float]:
    process, core, start = psutil.Process(), MetricsCore(), 1.7e9
    before = process.memory_info().rss
    job = core.jobs["job"] = Job("job", start)
    for number, at in enumerate(day(), 1):
        for group in range(groups):
            told = replace(step_record(start + at, number), seconds=1.0, participants=groups, busy_seconds=0.9)
            job.add_step(f"g{group}:{int(at // 8640)}", told, start + at)
            if number % 240 == group % 240:
                replica_id = f"g{group}:{int(at // 8640)}"
                lost = EventRecord(
                    t=start + at,
                    id=number,
                    job="job",
                    event="lost",
                    replica_id=replica_id,
                    epoch=1,
                    detail={"reason": "x"},
                )
                job.add_event(lost, number)
    job.last_seen = start + 86400
    held = process.memory_info().rss - before
    began = time.perf_counter()
    dumped = len(msgpack.packb(core.dump()))
    return {
        "groups": groups,
        "rss_mib": round(held / 2**20, 1),
        "kib_per_group": round(held / groups / 1024, 1),
        "snapshot_mib": round(dumped / 2**20, 1),
        "snapshot_seconds": round(time.perf_counter() - began, 3),
    }


async def sender(steps: int) -> dict[str, float]:
    """Measure the processor time of this process over steps of 5 ms, with a sender and without, in turns."""
    async with service() as (url, _):
        telling = Sender("worker", "a:1", lambda: url, Identity(), job="job")
        running = asyncio.create_task(telling.run())
        cpu = {True: 0.0, False: 0.0}
        for turn in range(10):
            before = time.process_time()
            for number in range(steps // 10):
                if turn % 2:
                    telling.record(step_record(time.time(), number))
                await asyncio.sleep(STEP_SECONDS)
            cpu[turn % 2 == 1] += time.process_time() - before
        running.cancel()
        await asyncio.wait([running])
    cost = (cpu[True] - cpu[False]) / (steps // 2)
    return {"us_per_step": round(1e6 * cost, 1), "share_of_a_5_ms_step": round(cost / STEP_SECONDS, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["ingest", "memory", "sender"])
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10, help="steps of each group per second")
    parser.add_argument("--seconds", type=int, default=10)
    given = parser.parse_args()
    if given.what == "ingest":
        print(json.dumps(asyncio.run(ingest(given.groups, given.steps, given.seconds))))
    else:
        print(json.dumps(memory(given.groups) if given.what == "memory" else asyncio.run(sender(2000))))


if __name__ == "__main__":
    main()
