"""Senders of records when the metrics service is frozen, refuses, or is something else."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol.telemetry_records import StepRecord
from keepstep_mesh.security.tokens import Tokens
from keepstep_mesh.telemetry import record_sender
from keepstep_mesh.telemetry.record_sender import Sender
from tests.support.services.lighthouse_driver import eventually
from tests.support.services.metrics_driver import JOB, client, metrics, metrics_process

TOKENS = Tokens(worker="worker-" * 3, service="service-" * 3)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_sender, "BATCH_SECONDS", 0.5)
    monkeypatch.setattr(record_sender, "BACKOFF", Backoff(0.01, 0.1))


@asynccontextmanager
async def sending(address: str, identity: Identity | None = None) -> AsyncIterator[Sender]:
    one = Sender("worker", "a:1", lambda: address, identity or Identity(), job=JOB, interval=0.01)
    running = asyncio.create_task(one.run())
    try:
        yield one
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.wait([running])


def tell(sender: Sender, count: int, **more: object) -> None:
    for number in range(count):
        sender.record(StepRecord(**{"t": time.time(), "step": number + 1, "seconds": 0.001, "committed": True, **more}))


async def test_records_sent_to_a_frozen_service_count_once_when_it_goes_on() -> None:
    async with metrics_process() as (process, url), client(url) as asking, sending(url) as sender:
        tell(sender, 1)
        await asking.until("goodput", lambda it: it["steps_committed"] == 1)
        process.send_signal(signal.SIGSTOP)
        try:
            tell(sender, 5)
            await eventually(lambda: sender._failures_logged._written)  # it gave up a request
            tell(sender, 5)
        finally:
            process.send_signal(signal.SIGCONT)
        await asking.until("goodput", lambda it: it["steps_committed"] >= 11)
        await eventually(lambda: not len(sender._outbox))
        assert (await asking.get("goodput"))["steps_committed"] == 11
        assert sender.dropped == 0


async def test_a_sender_measures_the_offset_of_its_clock_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = time.time
    monkeypatch.setattr(record_sender, "WARN_CLOCK_SECONDS", -1.0)
    async with metrics_process() as (_, url), client(url) as asking, sending(url) as sender:
        monkeypatch.setattr(record_sender.time, "time", lambda: clock() - 20)
        tell(sender, 1)
        await eventually(lambda: sender.clock_offset.seconds)
        tell(sender, 1)
        await asking.until("goodput", lambda it: it["steps_committed"] == 2)
    assert sender.clock_offset.seconds == pytest.approx(20, abs=1)
    assert "clock differs" in caplog.text


async def test_a_sender_whose_token_was_changed_goes_on_with_the_new_one() -> None:
    shown = ["wrong-" * 4]
    async with (
        metrics(tokens=TOKENS) as one,
        client(one.address, TOKENS.worker) as asking,
        sending(one.address, Identity(lambda: shown[-1])) as sender,
    ):
        tell(sender, 3)
        await eventually(lambda: sender._failures_logged._written)
        shown.append(TOKENS.worker or "")
        assert (await asking.until("goodput", lambda it: it["steps_committed"]))["steps_committed"] == 3
        assert sender.dropped == 0


async def test_a_batch_that_is_refused_as_bad_is_given_up_and_counted_and_the_next_is_told() -> None:
    async with metrics() as one, client(one.address) as asking, sending(one.address) as sender:
        tell(sender, 2, seconds="a while")
        await eventually(lambda: sender.dropped == 2)
        tell(sender, 3)
        assert (await asking.until("goodput", lambda it: it["steps_committed"]))["steps_committed"] == 3
        assert one.core.dropped_total == 2


@asynccontextmanager
async def answering(*statuses: int) -> AsyncIterator[tuple[str, list[int]]]:
    """A real server that gives each answer in turn, the last for ever; its address and the sizes of what came."""
    came: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        came.append(len(await request.read()))
        return web.Response(status=statuses[min(len(came), len(statuses)) - 1], headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", came
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("status", [204, 302, 307, 404, 500, 503])
async def test_a_batch_that_was_not_accepted_is_sent_again(status: int) -> None:
    async with answering(status, status, 200) as (address, came), sending(address) as sender:
        tell(sender, 3)
        await eventually(lambda: not len(sender._outbox))
        assert (len(came), sender.dropped) == (3, 0)


@pytest.mark.parametrize("status", [400, 413])
async def test_a_refused_batch_is_sent_once(status: int) -> None:
    async with answering(status, 200) as (address, came), sending(address) as sender:
        tell(sender, 3)
        await eventually(lambda: not len(sender._outbox))
        assert (len(came), sender.dropped) == (1, 3)


async def test_a_service_that_is_away_for_long_costs_only_the_oldest_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_sender, "MAX_QUEUED_BYTES", 10_000)
    known: list[str] = []
    sender = Sender("worker", "a:1", lambda: known[-1] if known else None, Identity(), job=JOB, interval=0.01)
    running = asyncio.create_task(sender.run())
    try:
        tell(sender, 1000)
        kept = len(sender._outbox)
        assert 0 < kept < 100
        async with metrics() as one, client(one.address) as asking:
            known.append(one.address)
            told = await asking.until("goodput", lambda it: it["steps_committed"] >= kept)
            assert (told["steps_committed"], sender.dropped) == (kept, 1000 - kept)
            assert one.core.dropped_total == 1000 - kept
            assert (await asking.get("now"))["step"] == 1000
    finally:
        running.cancel()
        await asyncio.wait([running])
