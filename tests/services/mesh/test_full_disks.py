"""Every service and log on a small disk that is full, again and again: acknowledged writes stay, and it recovers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import aiohttp
import pytest

from keepstep.step.reporting.step_log import STEP_LOG_ENV, StepLog
from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.injecting.exhausting import FullDisk
from keepstep_cli.running.console.log_folder import LogFolder
from keepstep_relay.core.events import Limits
from keepstep_relay.tiers.disk_tier import DiskError
from tests.support.services.command import environment, service_process
from tests.support.services.lighthouse_driver import DEADLINE, eventually, lighthouse, round_of, worker
from tests.support.services.metrics_driver import Teller, metrics, step
from tests.support.services.metrics_driver import client as metrics_client
from tests.support.services.relay_driver import Client, State, client, relay, state

ROUNDS = 8
LIVE = state(1, 100_000)
small = pytest.mark.parametrize("small_disk", ["3m"], indirect=True)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


async def answered(http: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, str]:
    async with asyncio.timeout(DEADLINE), http.patch(url, json=body) as answer:
        return answer.status, await answer.text()


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not await true():  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.05)


# ---- lighthouse


async def with_a_job(address: str) -> None:
    async with worker(address) as one:
        await round_of([one])


@small
async def test_a_lighthouse_says_that_its_disk_is_full_and_keeps_what_it_acknowledged(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"store": f"sqlite://{small_disk}/x.db", "event_log": small_disk / "events.jsonl"}
    async with lighthouse(**settings) as one, aiohttp.ClientSession() as http:
        await with_a_job(one.address)
        url, known = f"{one.address}/v1/jobs/job", 0
        for _ in range(ROUNDS):
            with FullDisk(small_disk):
                refused = ""
                while not refused:  # a page of the journal may have room
                    status, text = await answered(http, url, min_replicas=known + 1)
                    known, refused = (known + 1, "") if status == 202 else (known, text)
                async with http.get(f"{one.address}/readyz") as ready:
                    assert ready.status == 503
                    refused = await ready.text()
            free = r"\d{1,5}"  # pages that the write which failed has given back
            assert re.search(
                rf"{small_disk}.* the disk is full: {free} of 3145728 bytes are free.*free space there", refused
            )

            async def accepted(wanted: int = known + 1) -> bool:
                return (await answered(http, url, min_replicas=wanted))[0] == 202

            await until(accepted)
            known += 1
    assert sum("cannot begin a term" in line for line in errors(caplog)) <= ROUNDS
    assert sum("events were not written" in line for line in errors(caplog)) <= 1
    async with lighthouse(**settings) as one:
        assert one.jobs["job"].core.record.policy.min_replicas == known
    assert not check_files([small_disk / "events.jsonl"]).violations


@small
async def test_the_journal_of_a_lighthouse_does_not_fill_a_small_disk(small_disk: Path) -> None:
    async with lighthouse(store=f"sqlite://{small_disk}/x.db") as one, aiohttp.ClientSession() as http:
        await with_a_job(one.address)
        for number in range(1, 1500):
            assert await answered(http, f"{one.address}/v1/jobs/job", min_replicas=number) == (202, ANY)


@small
async def test_a_full_disk_under_its_event_log_alone_does_not_disturb_a_lighthouse(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "events.jsonl"
    async with lighthouse(event_log=path) as one, aiohttp.ClientSession() as http:
        await with_a_job(one.address)

        async def order(*numbers: int) -> None:
            for number in numbers:
                assert (await answered(http, f"{one.address}/v1/jobs/job", min_replicas=number))[0] == 202

        await order(1)
        await eventually(lambda: path.read_text().count("\n") == one.events.totals.total())
        with FullDisk(small_disk):
            await order(*range(2, 60))
            await eventually(lambda: bool(errors(caplog)))
        await order(60)
    (said,) = errors(caplog)
    assert f"No space left on device: 0 of 3145728 bytes are free on the disk of {path}; free space there" in said
    assert set(check_files([path]).counts) == {"gap"}  # more than one, if some of the lines still found room


# ---- relay


async def stored(worker: Client, one: State, name: str, number: int, **facts: Any) -> None:
    await worker.begin(name, number, **facts)
    await worker.manifest(one, name)
    for chunk in one.chunks:
        await worker.put(chunk)
    await worker.commit(name)


@pytest.mark.parametrize("small_disk", ["24m"], indirect=True)
async def test_a_full_relay_drops_live_states_that_no_process_uses(small_disk: Path) -> None:
    limits = Limits(reading_seconds=0.1)
    async with relay(data_dir=small_disk, limits=limits) as one, client(one.address) as worker:
        for number in range(1, 5):
            await stored(worker, state(number), f"c{number}", number, quorum_id=1)
            assert await worker.list() == [f"c{number}"], "two do not fit"
            await asyncio.sleep(0.2)  # no event says that a state is unused
    async with relay(data_dir=small_disk) as one, client(one.address) as worker:
        assert await worker.pack("c4") == state(4).pack


@pytest.mark.parametrize("small_disk", ["24m"], indirect=True)
async def test_room_that_a_relay_makes_for_one_write_is_there_for_another(
    small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Semaphore(0)
    async with relay(data_dir=small_disk, limits=Limits(reading_seconds=0.0)) as one, client(one.address) as worker:
        disk = one.chunks.disk
        assert disk is not None
        write, delete = disk.write, disk.delete

        def count(digest: bytes, data: memoryview, sync: bool) -> None:
            try:
                write(digest, data, sync)
            except DiskError:
                failed.release()
                raise

        def delete_late(digests: tuple[bytes, ...]) -> None:
            monkeypatch.setattr(disk, "delete", delete)
            for _ in range(2):
                assert failed.acquire(timeout=DEADLINE)
            delete(digests)

        await stored(worker, state(1), "c1", 1, quorum_id=1)
        monkeypatch.setattr(disk, "write", count)
        monkeypatch.setattr(disk, "delete", delete_late)
        await stored(worker, state(2), "c2", 2, quorum_id=1)
    assert not errors(caplog)


@pytest.mark.parametrize("small_disk", ["24m"], indirect=True)
async def test_a_relay_on_a_disk_that_fills_again_and_again_keeps_every_commit(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with relay(data_dir=small_disk) as one, client(one.address) as worker:
        for number in range(ROUNDS):
            small, name = state(number, 100_000), f"c{number}"
            with FullDisk(small_disk):
                refused = await worker.begin(name, number, 507, kind="durable")
                for words in (str(small_disk), "No space left on device: 0 of 25165824 bytes are free", "free space"):
                    assert words in refused["detail"]
            await worker.begin(name, number, 200, kind="durable")
            with FullDisk(small_disk):
                await worker.manifest(small, name, status=507)
            await worker.manifest(small, name)
            with FullDisk(small_disk):
                await worker.put(small.pack)
                await one.chunks._to_write.join()
                await worker.commit(name, 507)
                assert await worker.pack(name) == small.pack, "from memory"
            await worker.commit(name)
    assert len(errors(caplog)) == 1
    async with relay(data_dir=small_disk) as one, client(one.address) as worker:
        assert {*await worker.list()} == {f"c{number}" for number in range(ROUNDS)}
        for number in range(ROUNDS):
            assert await worker.pack(f"c{number}") == state(number, 100_000).pack
    assert not [*(small_disk / "partial").iterdir()]


@pytest.mark.parametrize("small_disk", ["24m"], indirect=True)
async def test_a_live_state_goes_through_a_relay_whose_disk_is_full_from_the_begin(small_disk: Path) -> None:
    async with relay(data_dir=small_disk) as one, client(one.address) as worker:
        with FullDisk(small_disk):
            await worker.begin()
            await worker.manifest(LIVE)
            await worker.put(LIVE.pack)
            await one.chunks._to_write.join()
            await worker.commit(status=507)
            assert await worker.pack() == LIVE.pack
        await worker.commit()
    async with relay(data_dir=small_disk) as one, client(one.address) as worker:
        assert await worker.pack() == LIVE.pack


@pytest.mark.parametrize("small_disk", ["24m"], indirect=True)
async def test_a_full_durable_tier_is_behind_until_it_has_room(tmp_path: Path, small_disk: Path) -> None:
    url, disk = f"file://{small_disk}", tmp_path / "disk"
    async with relay(durable=url, data_dir=disk) as one, client(one.address) as worker:
        copies = one.checkpoints.copies
        with FullDisk(small_disk):
            await stored(worker, state(1), "c1", 1, kind="durable")
            await eventually(lambda: copies.behind_since is not None)
            assert f"0 of 25165824 bytes are free on the disk of {small_disk}" in (copies.trouble or "")
            assert await worker.pack() == state(1).pack
    with FullDisk(small_disk):  # a start on a full disk
        async with relay(durable=url, data_dir=disk) as one, client(one.address) as worker:
            assert await worker.pack() == state(1).pack
    async with relay(durable=url, data_dir=disk) as one:
        await eventually(lambda: bool(one.checkpoints.copies.complete))
    async with relay(durable=url) as one, client(one.address) as worker:
        assert await worker.pack() == state(1).pack


# ---- metrics service


@small
async def test_a_metrics_service_on_a_disk_that_fills_again_and_again_keeps_what_it_acknowledged(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teller, now, told = Teller("a:1"), time.time(), 0
    settings = {"data_dir": small_disk, "snapshot_every": 0.05}

    def batch() -> bytes:
        return teller.batch(step(now - 500 + told / 10, told + 1, 0.1, reason="x" * 500))

    async with metrics(**settings) as one, metrics_client(one.address) as asking:
        ingest = f"{one.address}/v1/ingest"
        for _ in range(ROUNDS):
            with FullDisk(small_disk):
                while True:
                    async with asking.http.post(ingest, data=batch()) as answer:
                        told += 1
                        if answer.status != 200:
                            refused = (await answer.json(content_type=None))["detail"]
                            break
                for words in (str(small_disk), "the disk is full: 0 of 3145728 bytes are free", "free space there"):
                    assert words in refused
                assert (await asking.get("goodput"))["steps_committed"] == told, "it serves"

            async def accepted() -> bool:
                async with asking.http.post(ingest, data=teller.batch()) as answer:
                    return answer.status == 200

            await until(accepted)
            await asking.call("GET", "/readyz")
    assert len(errors(caplog)) <= 2
    async with metrics(data_dir=small_disk) as one, metrics_client(one.address) as asking:
        assert (await asking.get(f"goodput?since={now - 600}&until={now}"))["steps_committed"] == told


# ---- starts


@small
@pytest.mark.parametrize("name", ["lighthouse", "metrics", "relay"])
async def test_a_service_that_is_killed_on_a_full_disk_starts_there_again(name: str, small_disk: Path) -> None:
    flags = {
        "lighthouse": ("--store", f"sqlite://{small_disk}/x.db", "--event-log", f"{small_disk}/events.jsonl"),
        "metrics": ("--data-dir", str(small_disk)),
        "relay": ("--data-dir", str(small_disk)),
    }[name]
    async with service_process(name, *flags) as (process, _):
        process.send_signal(signal.SIGKILL)
        await process.wait()
    with FullDisk(small_disk):
        async with (
            service_process(name, *flags) as (_, address),
            aiohttp.ClientSession() as http,
            http.get(f"{address}/healthz") as answer,
        ):
            assert answer.status == 200


# ---- logs


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_output_in_log_files_is_whole_again_after_a_full_disk(small_disk: Path) -> None:
    files = LogFolder(small_disk)
    assert files.line("r0", 0, "before") is None
    with FullDisk(small_disk):
        said = [files.line("r0", 0, f"{number} " + "x" * 500) for number in range(30)]
    assert files.line("r0", 0, "after") is None
    (once,) = [one for one in said if one]
    for words in ("--log-dir", str(small_disk), "0 of 65536 bytes are free", "free space there"):
        assert words in once
    assert (small_disk / "r0-0.log").read_text().splitlines()[-1] == "after"
    files.close()


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_run_goes_on_when_its_log_folder_is_full(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "script.py").write_text('for _ in range(999):\n    print("y" * 999)\n')
    command = ("run", "--replicas", "1", "--lighthouse", "x:1", "--log-dir", str(small_disk / "logs"), "script.py")
    done = subprocess.run(
        [sys.executable, "-m", "keepstep_cli", *command],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert (done.stdout + done.stderr).count("output is missing in the files of --log-dir") == 1
    assert (done.stdout + done.stderr).count("y" * 999) == 999


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_step_log_on_a_full_disk_shows_a_gap(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "steps.jsonl"
    monkeypatch.setenv(STEP_LOG_ENV, str(path))
    log = StepLog("night", "a:1", 0)
    log.write("started", 0, 0, lineage="x")
    with FullDisk(small_disk):
        for number in range(1, 50):
            log.write("committed", number, 1, lineage="x")
    log.write("committed", 50, 1, lineage="x")
    log.close()
    (said,) = errors(caplog)
    assert f"0 of 65536 bytes are free on the disk of {path}; free space there" in said
    assert json.loads(path.read_text().splitlines()[-1])["n"] == 51
