"""The queue of a sender: bounded, numbered, and never in the way."""

from __future__ import annotations

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from keepstep_mesh.telemetry import MAX_RECORD_BYTES, Outbox, pack_batch


def numbers(packed: list[bytes]) -> list[int]:
    return [msgpack.unpackb(one)["n"] for one in packed]


@given(st.lists(st.sampled_from(["add", "send", "taken"]), max_size=80), st.integers(1, 8))
def test_each_record_is_taken_once_with_its_number_or_dropped_and_counted(doings: list[str], limit: int) -> None:
    box, added, flying, got = Outbox(limit), 0, None, []
    for doing in doings:
        if doing == "add":
            added += 1
            box.add({"n": added})
        elif doing == "send":
            flying = box.batch()
            assert numbers(flying[1]) == [*range(flying[0], flying[0] + len(flying[1]))]
        elif flying is not None:
            first, packed = flying
            got += numbers(packed)
            box.taken(first + len(packed) - 1)
            flying = None
        assert len(box) <= limit
    lost = {*range(1, added + 1)} - {*got, *numbers(box.batch()[1])}
    assert len(lost) <= box.dropped
    assert len(got) == len({*got})
    assert numbers(box.batch()[1]) == [*range(added - len(box) + 1, added + 1)]


def test_a_batch_has_a_limit_but_at_least_one_record() -> None:
    box = Outbox()
    for n in range(10):
        box.add({"n": n, "text": "x" * 100})
    assert numbers(box.batch(max_bytes=250)[1]) == [0, 1]
    assert numbers(box.batch(max_bytes=1)[1]) == [0]


def test_a_record_that_is_too_large_is_dropped_and_what_cannot_be_packed_is_sent_as_text() -> None:
    box = Outbox()
    box.add({"n": 1, "text": "x" * MAX_RECORD_BYTES})
    box.add({"n": 2, "odd": {1, 2}})
    assert (len(box), box.dropped) == (1, 1)
    assert msgpack.unpackb(box.batch()[1][0])["odd"] == "{1, 2}"


def test_a_packed_batch_is_one_map() -> None:
    box = Outbox()
    box.add({"n": 1})
    box.add({"n": 2})
    first, records = box.batch()
    found = msgpack.unpackb(pack_batch({"name": "a", "first": first}, records))
    assert found == {"name": "a", "first": 1, "records": [{"n": 1}, {"n": 2}]}
