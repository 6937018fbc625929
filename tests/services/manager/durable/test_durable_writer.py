"""The writer of durable checkpoints: back-pressure at a relay that accepts no connection, and aborts of other ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from keepstep.checkpoint.managed import durable_upload, durable_writer
from keepstep.checkpoint.managed.durable_upload import Ticket, tell_failures
from keepstep.checkpoint.managed.durable_writer import DurableWriter
from keepstep.connection.http_connection import Connection, Endpoint
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.relay_client.relay_requests import RelayCheckpoint, View
from tests.services.relay_transport.scene import switched_off
from tests.support.checkpoints.checkpoint_ends import eventually
from tests.support.services.relay_driver import client, relay


def ticket(step: int, uploader: str = "a") -> Ticket:
    facts = {"step": step, "kind": "durable", "ranks": 1, "quorum_id": 1, "one_producer": False}
    return Ticket(RelayCheckpoint("job", f"step-{step}", 0, "a"), step, facts, (uploader,), 0.5)


@contextmanager
def writer(*, seconds: float, newest_wins: bool) -> Iterator[DurableWriter]:
    one = DurableWriter(seconds=seconds, newest_wins=newest_wins, limiter=RateLimiter(None))
    try:
        yield one
    finally:
        one.close()


class AbortedBefore(RelayCheckpoint):
    """Another rank aborts the checkpoint just before the relay hears that this one begins."""

    url = ""

    def begin(self, connection: Connection, facts: Mapping[str, Any], *, again: bool = True) -> View:
        tell_failures({self.url: Endpoint.of(self.url, dict)}, [(ticket(1), "no memory")])
        return super().begin(connection, facts, again=again)


def offer(one: DurableWriter, url: str, step: int, uploader: str = "a") -> None:
    state: dict[str, Any] = {"w": torch.full((10,), float(step))}
    one.offer(ticket(step, uploader), [Endpoint.of(url, dict)], state)


def test_a_due_checkpoint_waits_for_the_upload_before_it_and_not_for_ever() -> None:
    with switched_off() as url, writer(seconds=1.0, newest_wins=False) as one:
        offer(one, url, 1)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"checkpoint of step \d is still being uploaded after 0.2 s"):
            one._seconds = 0.2
            offer(one, url, 2)
        assert time.monotonic() - began < 30


def test_training_hardly_waits_while_writes_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_writer, "FAILING_WAIT_SECONDS", 0.1)
    with switched_off() as url, writer(seconds=20.0, newest_wins=False) as one:
        one.failed(1, "the relay does not answer")
        offer(one, url, 2)
        with pytest.raises(TimeoutError, match=r"still being uploaded after 0.1 s"):
            offer(one, url, 3)


def test_the_newest_one_replaces_the_one_that_waits_and_training_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_upload, "DURABLE_ABORT_SECONDS", 0.1)
    with switched_off() as url, writer(seconds=60.0, newest_wins=True) as one:
        offer(one, url, 1)
        eventually(lambda: one.last.uploading == 1)
        for step in (2, 3, 4):
            offer(one, url, step)
        assert one.last.uploading == 1
        assert one._next is not None
        assert one._next.ticket.step == 4
        assert [work.ticket.step for work in one._replaced] == [2, 3]


def test_a_checkpoint_that_one_group_replaces_is_not_aborted_for_the_groups_that_upload_it_too() -> None:
    with switched_off() as url, writer(seconds=60.0, newest_wins=True) as one:
        offer(one, url, 1)
        eventually(lambda: one.last.uploading == 1)
        for step in (2, 3):
            shared = replace(ticket(step), uploaders=("a", "b"))
            one.offer(shared, [Endpoint.of(url, dict)], {"w": torch.ones(1)})
        assert one._next is not None
        assert one._next.ticket.step == 3
        assert one._replaced == []


def test_an_upload_that_waits_is_not_given_up_for_the_outcome_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_upload, "DURABLE_ABORT_SECONDS", 0.1)
    with switched_off() as url, writer(seconds=60.0, newest_wins=True) as one:
        offer(one, url, 1)
        eventually(lambda: one.last.uploading == 1)
        offer(one, url, 2)
        offer(one, url, 3, uploader="b")
        assert one._next is not None
        assert one._next.ticket.step == 2
        assert one._next.snapshot is not None


def test_the_end_waits_once_for_relays_that_hang_whatever_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_upload, "DURABLE_ABORT_SECONDS", 0.5)
    with switched_off() as url, switched_off() as other:
        one = DurableWriter(seconds=60.0, newest_wins=True, limiter=RateLimiter(None))
        for step in range(1, 12):
            one.offer(ticket(step), [Endpoint.of(url, dict), Endpoint.of(other, dict)], {"w": torch.ones(1)})
            eventually(lambda: one.last.uploading == 1)
        assert len(one._replaced) == 9
        began = time.monotonic()
        one.close()
        assert time.monotonic() - began < 5, "18 aborts, one after the other, take 9 s"
        assert one._thread is None


async def test_uploads_that_wait_for_a_lost_rank_fail_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_upload, "COPY_PATIENCE_SECONDS", 0.5)
    async with relay(memory_checkpoints=1) as other:
        with writer(seconds=3600.0, newest_wins=True) as one:

            def upload_alone() -> None:
                for step in (1, 2):
                    of_two = replace(ticket(step), facts={**ticket(step).facts, "ranks": 2})
                    one.offer(of_two, [Endpoint.of(other.address, dict)], {"w": torch.ones(10)})
                    eventually(lambda: one.last.uploading == 1)
                one.hurry()
                eventually(lambda: one.last.error_step == 2)

            await asyncio.to_thread(upload_alone)
            assert "was not stored" in one.last.error


async def test_an_upload_that_another_rank_aborts_just_before_it_begins_does_not_begin_again() -> None:
    checkpoint = AbortedBefore("job", "step-1", 1, "a")
    facts = {**ticket(1).facts, "ranks": 2}

    def upload() -> str:
        with writer(seconds=30.0, newest_wins=False) as one:
            late = Ticket(checkpoint, 1, facts, ("a",), 0.5)
            one.offer(late, [Endpoint.of(checkpoint.url, dict)], {"w": torch.ones(10)})
            assert one.finish(60)
            return one.last.error

    async with relay(memory_checkpoints=True) as one:
        checkpoint.url = one.address
        for _ in range(2):  # ranks of two groups
            assert "step-1 of job job was deleted: no memory" in await asyncio.to_thread(upload)


async def test_a_relay_hears_of_each_failure_also_if_other_ranks_have_told_it_the_newest_one() -> None:
    async with relay(memory_checkpoints=True) as one, client(one.address) as reader:
        relays = {one.address: Endpoint.of(one.address, dict)}
        await asyncio.to_thread(tell_failures, relays, [(ticket(2), "no memory")])
        await asyncio.to_thread(tell_failures, relays, [(ticket(1), "no room"), (ticket(2), "no memory")])
        for name, reason in (("step-1", "no room"), ("step-2", "no memory")):
            assert reason in (await reader.show(name, 410))["detail"]
