"""The queue of a sender: bounded, numbered, and never in the way."""

from __future__ import annotations

from uuid import uuid4

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_mesh.protocol.telemetry_records import EventRecord
from keepstep_mesh.telemetry.record_sender import MAX_QUEUED_BYTES, MAX_RECORD_BYTES, Outbox


def record(number: int, **detail: object) -> EventRecord:
    return EventRecord(t=0.0, id=number, event="lost", detail=detail)


def numbers(packed: list[bytes]) -> list[int]:
    return [msgpack.unpackb(one)["id"] for one in packed]


@given(st.lists(st.sampled_from(["add", "send", "taken"]), max_size=80), st.integers(1, 8))
def test_each_record_is_taken_once_with_its_number_or_dropped_and_counted(doings: list[str], limit: int) -> None:
    box, added, flying, got = Outbox(limit), 0, None, []
    for doing in doings:
        if doing == "add":
            added += 1
            box.add(record(added))
        elif doing == "send":
            flying = box.batch()
            assert numbers(flying[1]) == [*range(flying[0], flying[0] + len(flying[1]))]
        elif flying is not None:
            first, packed = flying
            got += numbers(packed)
            box.remove(first + len(packed) - 1)
            flying = None
        assert len(box) <= limit
    lost = {*range(1, added + 1)} - {*got, *numbers(box.batch()[1])}
    assert len(lost) <= box.dropped
    assert len(got) == len({*got})
    assert numbers(box.batch()[1]) == [*range(added - len(box) + 1, added + 1)]


def test_a_batch_has_a_limit_but_at_least_one_record() -> None:
    box = Outbox()
    for n in range(10):
        box.add(record(n, text="x" * 100))
    assert numbers(box.batch(max_bytes=380)[1]) == [0, 1]
    assert numbers(box.batch(max_bytes=1)[1]) == [0]


def test_a_record_that_is_too_large_is_dropped_and_what_cannot_be_packed_is_sent_as_text() -> None:
    box = Outbox()
    box.add(record(1, text="x" * MAX_RECORD_BYTES))
    box.add(record(2, odd={1, 2}))
    assert (len(box), box.dropped) == (1, 1)
    assert msgpack.unpackb(box.batch()[1][0])["detail"]["odd"] == "{1, 2}"


@pytest.mark.parametrize("odd", [2**64, "\udcff", {"\udcff": 1}])
def test_a_record_that_msgpack_cannot_encode_never_raises(odd: object) -> None:
    box = Outbox()
    box.add(record(1, odd=odd))
    assert len(box) + box.dropped == 1


def test_a_record_that_contains_itself_is_dropped_and_counted() -> None:
    box, circle = Outbox(), []
    circle.append(circle)
    box.add(record(1, circle=circle))
    assert (len(box), box.dropped) == (0, 1)


def test_a_quorum_of_a_thousand_groups_is_told() -> None:
    box = Outbox()
    box.add(record(1, members=[f"group-{n}:{uuid4()}" for n in range(1000)]))
    assert (len(box), box.dropped) == (1, 0)


def test_large_records_do_not_fill_the_memory() -> None:
    box = Outbox()
    for n in range(1000):
        box.add(record(n, text="x" * 100_000))
    assert sum(map(len, box.batch(10**9)[1])) <= MAX_QUEUED_BYTES
    assert len(box) + box.dropped == 1000
    assert numbers(box.batch(10**9)[1])[-1] == 999


def test_a_refused_batch_is_given_up_and_counted() -> None:
    box = Outbox()
    for n in range(5):
        box.add(record(n))
    first, records = box.batch()
    box.add(record(5))
    box.remove(first + len(records) - 1, refused=True)
    assert (box.batch()[0], numbers(box.batch()[1]), box.dropped) == (6, [5], 5)
