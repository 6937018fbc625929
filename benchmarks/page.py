"""Measure the time in which the dashboard shows a job of many groups, and its cost.

    python benchmarks/page.py --groups 256 --steps 10

A metrics service process with a disk receives one batch per second from one sender for each group, and records from one
lighthouse. A headless chromium shows the page. ``load``: from opening the address until the page is live and shows the
past. ``shown``: from the record of a loss in the lighthouse's sender to its line in the table of groups, with the wait
for the next batch (0.1 s) and for the next picture of the stream (0.25 s). Needs chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from metrics import service, step_record

from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol.telemetry_records import EventRecord
from keepstep_mesh.telemetry.record_sender import Sender

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser.devtools import chromium
from tests.browser.told import SHOWN, row

WARM_UP = 15.0
"""Seconds of steps before the first look."""
LOADS, LOSSES = 5, 20


async def train(names: list[str], url: str, steps: int) -> None:
    """Report steps until cancelled."""
    async with asyncio.TaskGroup() as group:
        senders = [Sender("worker", f"{name}:1", lambda: url, Identity(), job="job") for name in names]
        for sender in senders:
            group.create_task(sender.run())
        number = 0
        while True:
            number += 1
            told = step_record(time.time(), number)
            for sender in senders:
                sender.record(told)
            await asyncio.sleep(1 / steps)


async def look(groups: int, steps: int) -> dict[str, float]:
    names = [f"g{number:04}" for number in range(groups)]
    async with service() as (url, process), contextlib.AsyncExitStack() as ended:
        training = asyncio.create_task(train(names, url, steps))
        lighthouse = Sender("lighthouse", "l", lambda: url, Identity(), interval=0.1)
        telling = asyncio.create_task(lighthouse.run())
        for task in (training, telling):
            ended.callback(task.cancel)
        await asyncio.sleep(WARM_UP)
        folder = Path(ended.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        browser = await ended.enter_async_context(chromium(folder))
        loads: list[float] = []
        for _ in range(LOADS):
            began = time.perf_counter()
            page = await browser.open(url)
            await page.until(SHOWN)
            loads.append(time.perf_counter() - began)
            if len(loads) < LOADS:
                await page.tell("Page.close")
        shown: list[float] = []
        began, before = time.perf_counter(), process.cpu_times()
        for number, name in enumerate(names[:LOSSES]):
            loss = {
                "event": "lost",
                "job": "job",
                "replica_id": f"{name}:1",
                "epoch": 1,
                "detail": {"reason": "killed"},
            }
            told = time.perf_counter()
            lighthouse.record(EventRecord(t=time.time(), id=number + 1, **loss))
            await page.until(f"{row(name)}.includes('lost')")
            shown.append(time.perf_counter() - told)
        took, after = time.perf_counter() - began, process.cpu_times()
        return {
            "groups": groups,
            "load_p50_s": round(statistics.median(loads), 2),
            "load_max_s": round(max(loads), 2),
            "shown_p50_s": round(statistics.median(shown), 2),
            "shown_max_s": round(max(shown), 2),
            "service_cores": round((after.user + after.system - before.user - before.system) / took, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10, help="steps of each group per second")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(look(given.groups, given.steps))))


if __name__ == "__main__":
    main()
