"""Failures of disks, data, clocks, and readers of the metrics service."""

from __future__ import annotations

import asyncio
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgpack
import pytest
from aiohttp import web

from keepstep_mesh.discovery.registration import Registration, registered
from keepstep_mesh.serving import server_sent_events
from keepstep_metrics.api import stream
from keepstep_metrics.app import FILE, Metrics, MetricsSettings
from keepstep_metrics.storage.event_store import Store, StoreError
from tests.support.services.lighthouse_driver import eventually, lighthouse
from tests.support.services.metrics_driver import (
    DEADLINE,
    JOB,
    Client,
    Teller,
    client,
    event,
    following,
    metrics,
    metrics_process,
    step,
)


async def deliver(asking: Client, body: bytes) -> int:
    """Send until it is accepted, as a sender does. Return the number of refusals before."""
    refused = 0
    async with asyncio.timeout(DEADLINE):
        while True:
            async with asking.http.post(f"{asking.address}/v1/ingest", data=body) as answer:
                if answer.status == 200:
                    return refused
                assert answer.status == 503, await answer.text()
                refused += 1
            await asyncio.sleep(0.05)  # the disk reports no event


@pytest.mark.parametrize("small_disk", ["3M"], indirect=True)
async def test_after_a_disk_was_full_all_goes_on_and_what_is_kept_grows_no_more(small_disk: Path) -> None:
    worker, told, now = Teller("a:1"), 0, time.time()
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (2 << 20))
    settings = {"data_dir": small_disk, "snapshot_every": 0.05, "keep_events": 1.0}
    async with metrics(**settings) as one, client(one.address) as asking:
        await asking.tell(Teller(), event(now + 2, "joined", "b:1"))  # to be forgotten while the disk is full

        async def until_full() -> bytes:
            nonlocal told
            while True:
                told += 1
                body = worker.batch(step(now - 1000 + told / 10, told, 0.1, reason="x" * 900))
                async with asking.http.post(f"{one.address}/v1/ingest", data=body) as answer:
                    if answer.status != 200:
                        return body

        with (small_disk / "more").open("wb", buffering=0) as more:
            try:
                while True:
                    more.write(b"x" * 65536)
            except OSError:
                pass
        body = await asyncio.wait_for(until_full(), DEADLINE)
        assert "full" in (await asking.call("GET", "/readyz", 503))["detail"]
        await eventually(lambda: time.time() > now + 3.5)
        ballast.unlink()
        (small_disk / "more").unlink()
        await deliver(asking, body)
        await asking.call("GET", "/readyz")
        for _ in range(2):
            told += 1
            await deliver(asking, worker.batch(step(now - 1000 + told / 10, told, 0.1)))

        async def journal() -> int:
            execute = one.store._connection.execute
            rows = await one.store._in_thread(lambda: execute("SELECT count(*) FROM journal").fetchone())
            return int(rows[0])

        async with asyncio.timeout(DEADLINE):
            # The cleanup goes on, too.
            while await journal() or (await asking.get("events"))["events"]:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.02)
        before = await asking.get(f"goodput?since={now - 1001}&until={now}")
    assert before["steps_committed"] == told
    async with metrics(data_dir=small_disk) as one, client(one.address) as asking:
        assert await asking.get(f"goodput?since={now - 1001}&until={now}") == before


@pytest.mark.parametrize("small_disk", ["3M"], indirect=True)
async def test_a_disk_with_no_room_for_a_snapshot_takes_batches(small_disk: Path) -> None:
    store = await Store.open(small_disk / FILE)
    writing = asyncio.create_task(store.run())
    try:
        store.snapshot({"large": bytes(8 << 20)})
        store.add(1.0, b"a batch", [])
        await store.written(DEADLINE)
        assert await store.load() == (None, [(1.0, b"a batch")])
    finally:
        writing.cancel()
        await asyncio.wait([writing])
        await store.close()


async def test_a_request_that_waits_for_the_disk_is_answered_when_the_service_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on, commit = threading.Event(), threading.Event(), Store._commit

    def slow(*what: Any) -> None:
        writing.set()
        assert go_on.wait(DEADLINE)
        commit(*what)

    monkeypatch.setattr(Store, "_commit", slow)
    one, worker = Metrics(MetricsSettings(bind="127.0.0.1:0", data_dir=tmp_path)), Teller("a:1")
    await one.start()
    async with client(one.address) as asking, asyncio.timeout(DEADLINE):
        telling = asyncio.create_task(asking.tell(worker, step(time.time(), 1)))
        await asyncio.to_thread(writing.wait, DEADLINE)
        stopping = asyncio.create_task(one.stop())
        await eventually(lambda: not one.serving)
        go_on.set()
        assert await telling == 1
        await stopping
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        assert (await asking.get("goodput"))["steps_committed"] == 1


async def test_a_detail_that_is_no_json_stops_nothing(tmp_path: Path) -> None:
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        odd = {b"\xff": 1, "nan": float("nan"), "ext": msgpack.ExtType(5, b"x"), "bytes": b"\xff"}
        told = Teller()
        body = told.batch({**event(time.time(), "new"), "detail": odd})
        await asking.call("POST", "/v1/ingest", data=body)
        await asking.tell(told, event(time.time(), "joined", "a:1"))
        found = (await asking.get("events"))["events"]
        assert [said["event"] for said in found] == ["new", "joined"]
        assert found[0]["detail"]["nan"] is None


async def test_after_a_kill_a_stream_gives_each_event_once_and_in_order(tmp_path: Path) -> None:
    told = Teller()
    async with metrics_process("--data-dir", str(tmp_path)) as (process, url), client(url) as asking:
        for number in range(5):
            await asking.tell(told, event(time.time(), "joined", f"g{number}:1"))
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        await asking.tell(told, event(time.time(), "joined", "g5:1"))
        async with following(asking, after=0) as news:
            assert [(await anext(news))[1]["name"] for _ in range(6)] == [f"g{number}" for number in range(6)]


async def test_a_reader_who_knew_a_service_whose_data_are_gone_misses_nothing() -> None:
    async with metrics() as one, client(one.address) as asking:
        await asking.tell(Teller(), event(time.time(), "joined", "a:1"))
        async with following(asking, after=500) as news:
            assert (await anext(news))[1]["sentence"] == "a joined"


async def test_a_history_of_another_build_goes_and_later_events_are_kept(tmp_path: Path) -> None:
    told = Teller()
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        await asking.tell(told, event(time.time(), "joined", "a:1"), event(time.time(), "joined", "b:1"))
    with closing(sqlite3.connect(tmp_path / FILE)) as data:
        data.execute("UPDATE snapshot SET form = 999")
        data.commit()
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        await asking.tell(Teller(), event(time.time(), "joined", "c:1"))
        assert [(it["id"], it["name"]) for it in (await asking.get("events"))["events"]] == [
            (1, "a"), (2, "b"), (3, "c"),
        ]  # fmt: skip


async def test_a_batch_that_this_build_refuses_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    worker = Teller("a:1")
    async with metrics_process("--data-dir", str(tmp_path)) as (process, url), client(url) as asking:
        for number in (1, 2):
            await asking.tell(worker, step(time.time(), number))
        process.send_signal(signal.SIGKILL)
        await process.wait()
    with closing(sqlite3.connect(tmp_path / FILE)) as data:
        data.execute("UPDATE journal SET body = ? WHERE n = 1", (msgpack.packb({"source": "of old"}),))
        data.commit()
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        assert (await asking.get("now"))["step"] == 2


@pytest.mark.parametrize("where", ["everywhere", "beyond the first page", "in the snapshot"])
async def test_data_that_are_damaged_are_refused_with_what_to_do(tmp_path: Path, where: str) -> None:
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        for number in range(50):
            await asking.tell(Teller("a:1"), step(time.time(), number + 1, reason="x" * 900))
    file = tmp_path / FILE
    if where == "in the snapshot":
        with closing(sqlite3.connect(file)) as data:
            data.execute("UPDATE snapshot SET body = x'c1'")
            data.commit()
    else:
        sound = 4096 if where == "beyond the first page" else 0
        file.write_bytes(file.read_bytes()[:sound] + b"\xa5" * (file.stat().st_size - sound))
    with pytest.raises(StoreError, match="use another --data-dir"):
        async with metrics(data_dir=tmp_path):
            pass
    async with metrics_process("--data-dir", str(tmp_path / "other")):  # as it says
        pass


async def test_events_of_a_job_that_ended_days_ago_can_still_be_read(tmp_path: Path) -> None:
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        await asking.tell(Teller(), event(time.time(), "joined", "a:1"))
        one.core.forget_before(time.time() + 1)
        await asking.call("GET", f"/v1/jobs/{JOB}/now", 404)
        assert [it["name"] for it in (await asking.get("events"))["events"]] == ["a"]
        assert [it["name"] for it in (await asking.get("events?since_id=0"))["events"]] == ["a"]
        await asking.call("GET", "/v1/jobs/none/events", 404)


async def test_a_range_in_the_future_has_no_values() -> None:
    async with metrics() as one, client(one.address) as asking:
        now = time.time()
        await asking.tell(Teller("a:1"), step(now, 1))
        told = await asking.get(f"goodput?since={now - 1}&until={now + 3600}")
        assert sum(told["seconds"].values()) < 60
        (group,) = (await asking.get(f"timeline?since={now - 1}&until={now + 3600}"))["groups"]
        assert group["spans"][-1][1] < now + 60
        for path in ("timeline", "goodput", "steps"):
            await asking.get(f"{path}?since={now + 1000}&until={now + 3600}")
        assert (await asking.get(f"events?since_id={10**20 - 1}", JOB))["events"] == []


async def test_a_reader_who_takes_nothing_is_cut_off_and_the_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_sent_events, "SLOW_STREAM_SECONDS", 0.3)
    async with metrics() as one, client(one.address) as asking:
        told = Teller()
        await asking.tell(told, event(time.time(), "joined", "a:1"))
        at = urlsplit(one.address)
        with socket.create_connection((at.hostname, at.port)) as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.sendall(f"GET /v1/stream?job={JOB} HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: 0\r\n\r\n".encode())
            await eventually(lambda: one.streams.count == 1)
            async with following(asking) as news, asyncio.timeout(DEADLINE):
                number = 0
                while one.streams.count == 2:
                    number += 1
                    await asking.tell(told, event(time.time(), "x", f"g{number}:1", reason="x" * 200_000))
                    async for kind, said in news:
                        if kind == "event" and said["name"] == f"g{number}":
                            break
        assert number > 1


async def test_streams_of_jobs_that_never_come_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PING_SECONDS", 0.1)
    async with metrics() as one, client(one.address) as asking:
        for number in range(20):
            async with following(asking, f"none-{number}"):
                await eventually(lambda: bool(one.notifier.waiters))
        await eventually(lambda: not one.streams.count)
        assert not one.notifier.waiters


@asynccontextmanager
async def broken_lighthouse(*answers: str) -> AsyncIterator[tuple[str, list[str]]]:
    """A real server that gives each answer in turn, the last for ever; its address and what was asked."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "PUT":
            return web.json_response({})
        asked.append(request.path)
        return web.Response(text=answers[min(len(asked), len(answers)) - 1], content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


async def test_a_lighthouse_that_answers_nonsense_is_asked_again() -> None:
    nonsense = ("{", "[]", '{"services": 1}', '{"services": [{"kind": "relay", "name": 1, "address": 2}]}', "{")
    async with (
        broken_lighthouse(*nonsense) as (address, asked),
        metrics(lighthouses=(address,)) as one,
        client(one.address) as asking,
    ):
        await eventually(lambda: one.is_registered)
        await asking.tell(Teller("a:1"), step(time.time(), 1))
        async with asyncio.timeout(DEADLINE):
            while len(asked) < len(nonsense) + 2:
                await asking.get("now")  # a page asks
                await asyncio.sleep(0.05)
        assert "JSON" in (await asking.call("GET", "/v1/cluster", 502))["detail"]


@pytest.mark.parametrize(
    "said", ['{"checkpoints": [1]}', '{"checkpoints": [{"state": "begun"}]}', '{"checkpoints": 1}']
)
async def test_a_relay_that_answers_nonsense_hides_nothing_of_what_the_lighthouse_says(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        lighthouse() as known,
        broken_lighthouse(said) as (odd, asked),
        registered([known.address], Registration("relay", "odd", odd)),
        metrics(lighthouses=(known.address,)) as one,
        client(one.address) as asking,
    ):
        await eventually(lambda: one.is_registered)
        await asking.tell(Teller("a:1"), step(time.time(), 1))
        async with asyncio.timeout(DEADLINE):
            while len(asked) < 3:
                await asking.get("now")  # a page asks
                await asyncio.sleep(0.05)  # no event reports the request
    assert "the lighthouse does not say what it does" not in caplog.text


async def test_an_order_whose_body_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep_mesh.serving.application.BODY_SECONDS", 0.2)
    async with metrics() as one, aiohttp.ClientSession() as http:

        async def never() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

        url = f"{one.address}/v1/jobs/{JOB}/replicas/a/drain"
        async with asyncio.timeout(DEADLINE), http.post(url, data=never()) as answer:
            assert answer.status == 408


async def test_the_last_events_of_a_lighthouse_that_stops_in_good_order_are_told() -> None:
    async with lighthouse() as leading, metrics(lighthouses=(leading.address,)) as known:
        await eventually(lambda: leading.metrics_address() is not None)
        for number in range(50):
            leading.events.add(JOB, "joined", f"g{number}:1", {}, time.time())
        await leading.stop()
        assert len(known.core.jobs[JOB].groups) == 50
