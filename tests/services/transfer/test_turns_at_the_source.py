"""Readers of one source that share its uplink: few at a time, and the others hear that they wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from keepstep.checkpointing import HTTPTransport
from keepstep.state.errors import TransferTimeout
from keepstep.transfer.direct.sending import admission
from keepstep.transfer.direct.sending.admission import READERS_AT_ONCE
from tests.support.checkpoints.checkpoint_ends import MIB, RawReader, blank, same
from tests.support.checkpoints.checkpoint_peer import MINUTE, state_of

SECOND = timedelta(seconds=1)


def transport(**options: Any) -> HTTPTransport[Any]:
    return HTTPTransport(MINUTE, 1, hostname="127.0.0.1", **options)


@pytest.fixture
def narrow() -> Iterator[HTTPTransport[Any]]:
    """A source with 1 MiB of state, and as much uplink a second."""
    one = transport(uplink=MIB)
    one.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    yield one
    one.shutdown()


def test_time_in_the_queue_does_not_count_and_who_came_first_is_done_first(narrow: HTTPTransport[Any]) -> None:
    readers = [transport() for _ in range(4)]

    def receive(reader: HTTPTransport[Any]) -> float:
        began = time.monotonic()
        got = reader.recv_checkpoint(0, narrow.metadata(), 1, 1.5 * SECOND, into=blank(1), limit=MINUTE)
        assert same(got, state_of(1, 1))
        return time.monotonic() - began

    try:
        with ThreadPoolExecutor(len(readers)) as pool:
            seconds = sorted(pool.map(receive, readers))
    finally:
        for one in readers:
            one.shutdown()
    assert seconds[-1] > 2.5, "four copies take four seconds, and the queue is longer than the timeout"
    assert seconds[0] < 0.75 * seconds[-1], "they would all end together"


def test_all_of_it_takes_no_longer_than_the_limit(narrow: HTTPTransport[Any]) -> None:
    reader = transport()
    try:
        with pytest.raises(TransferTimeout, match=r"was not received within 0\.5 s"):
            reader.recv_checkpoint(0, narrow.metadata(), 1, MINUTE, limit=0.5 * SECOND)
    finally:
        reader.shutdown()


@pytest.fixture
def served() -> Iterator[tuple[HTTPTransport[Any], list[RawReader]]]:
    """A source, and readers that have all turns and take nothing."""
    source = transport()
    source.send_checkpoint([1], 1, state_of(1, 32), MINUTE)
    readers = [RawReader(source) for _ in range(READERS_AT_ONCE)]
    for one in readers:
        one.begin(1, 32 * MIB)
    yield source, readers
    for one in readers:
        one.close()
    source.shutdown()


def test_a_reader_that_asks_for_it_gets_its_place_in_the_queue(served: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(admission, "SLOW_JOINER_SECONDS", 60.0)
    source, readers = served
    waiting = RawReader(source)
    waiting.open(1)
    line = f"GET /lease/{waiting.lease} HTTP/1.1\r\nRange: bytes=0-99\r\nKeepstep-Queue: 0.050\r\n\r\n"
    waiting.connection.sendall(line.encode())
    for _ in range(3):
        head = waiting.head()
        assert " 102 " in head
        assert "Keepstep-Queue: 0" in head
    readers[0].take(32 * MIB)
    while " 102 " in (head := waiting.head()):
        pass
    assert " 206 " in head
    assert len(waiting.take(100)) == 100
    waiting.close()


def test_a_reader_that_does_not_ask_for_it_is_answered_in_its_turn(served: Any, monkeypatch: Any) -> None:
    """As a joiner of an older version."""
    monkeypatch.setattr(admission, "SLOW_JOINER_SECONDS", 60.0)
    source, readers = served
    waiting = RawReader(source)
    waiting.open(1)
    waiting.connection.sendall(f"GET /lease/{waiting.lease} HTTP/1.1\r\nRange: bytes=0-99\r\n\r\n".encode())
    readers[1].take(32 * MIB)
    assert " 206 " in waiting.head()
    waiting.close()


def test_readers_that_take_nothing_hold_up_nobody_for_long(served: Any) -> None:
    source, _ = served
    reader = transport()
    try:
        got = reader.recv_checkpoint(0, source.metadata(), 1, MINUTE, into=blank(32), limit=MINUTE)
        assert same(got, state_of(1, 32))
    finally:
        reader.shutdown()


def test_a_reader_that_goes_while_it_waits_leaves_its_place(served: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(admission, "SLOW_JOINER_SECONDS", 60.0)
    source, readers = served
    gone = RawReader(source)
    gone.open(1)
    gone.connection.sendall(
        f"GET /lease/{gone.lease} HTTP/1.1\r\nRange: bytes=0-99\r\nKeepstep-Queue: 0.050\r\n\r\n".encode()
    )
    assert " 102 " in gone.head()
    gone.close()
    reader = transport()
    try:
        readers[0].take(32 * MIB)
        got = reader.recv_checkpoint(0, source.metadata(), 1, MINUTE, into=blank(32), limit=MINUTE)
        assert same(got, state_of(1, 32))
    finally:
        reader.shutdown()


@pytest.mark.parametrize(
    "fields",
    [[], ["Keepstep-Joiner: j0"], ["Keepstep-Joiner: j0", "Keepstep-Serves: http://x:1", "Keepstep-Has: nonsense"]],
)
def test_invalid_facts_of_other_joiners_are_refused(narrow: HTTPTransport[Any], fields: list[str]) -> None:
    reader = RawReader(narrow)
    reader.open(1)
    head, body = reader.ask(f"GET /holders/{reader.lease}", *fields)
    assert " 400 " in head
    assert body
    reader.close()
