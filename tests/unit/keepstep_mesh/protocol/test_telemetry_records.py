"""Records for the metrics service: what one end packs, the other reads, across releases."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from keepstep_mesh.protocol.telemetry_records import (
    MAX_STEP_SECONDS,
    MAX_TEXT,
    BadBatchError,
    BatchHead,
    DurableRecord,
    EventRecord,
    Record,
    StateRecord,
    StepRecord,
    UploadRecord,
    pack_batch,
    pack_record,
    read_batch,
)

WORKER = BatchHead(source="worker", name="a:1", job="job", boot="x", first=3, dropped=2)
RELAY = BatchHead(source="relay", name="east", boot="x", first=1)
STEP = StepRecord(
    t=1.5,
    step=7,
    quorum_id=2,
    epoch=4,
    committed=False,
    reason="a peer died",
    participants=3,
    seconds=0.25,
    quorum_seconds=0.125,
    heal_seconds=0.5,
    busy_seconds=0.0625,
    values={"loss": 1.25},
)
DURABLE = DurableRecord(t=4.0, step=100, every=10, bytes=5, seconds=1.5, error="disk full")
UPLOAD = UploadRecord(
    t=9.0, began=1.0, job="job", checkpoint="c1", step=7, bytes=10, bytes_done=4, bytes_per_second=2.0, state="aborted",
    error="disk full",
)  # fmt: skip
EVENT = EventRecord(t=2.0, id=4, job="job", event="lost", replica_id="a:1", epoch=3, detail={"reason": "x", "n": [1]})


def read(head: BatchHead, *records: dict[str, Any]) -> tuple[Record | None, ...]:
    return read_batch(pack_batch(head, [msgpack.packb(one) for one in records])).records


def plain(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(pack_record(record))
    return found


@pytest.mark.parametrize(
    ("head", "record"),
    [(WORKER, STEP), (WORKER, StateRecord(t=1.0, state="healing")), (WORKER, DURABLE), (RELAY, UPLOAD), (RELAY, EVENT)],
)
def test_a_record_is_read_as_it_was_packed(head: BatchHead, record: Record) -> None:
    batch = read_batch(pack_batch(head, [pack_record(record)] * 2))
    assert batch.head == head
    assert batch.records == (record, record)


def test_a_field_that_an_older_peer_does_not_send_has_its_default() -> None:
    (step,) = read(WORKER, {"kind": "step", "t": 1, "step": 2, "seconds": 0.5})
    assert step == StepRecord(t=1.0, step=2, seconds=0.5)
    (event,) = read(RELAY, {"kind": "event", "t": 1, "id": 2, "event": "lost"})
    assert event == EventRecord(t=1.0, id=2, event="lost")


def test_fields_and_kinds_of_a_newer_peer_are_ignored() -> None:
    assert read(WORKER, {**plain(STEP), "mood": ["good"]}, {"kind": "mood", "t": "soon"}) == (STEP, None)


def test_a_record_that_its_source_may_not_send_is_ignored() -> None:
    assert read(WORKER, plain(EVENT), plain(UPLOAD)) == (None, None)
    assert read(RELAY, plain(STEP)) == (None,)


@pytest.mark.parametrize("name", ["t", "step", "seconds"])
def test_a_required_field_that_is_missing_is_named(name: str) -> None:
    incomplete = {key: value for key, value in plain(STEP).items() if key != name}
    with pytest.raises(BadBatchError, match=f"^{name} is missing"):
        read(WORKER, incomplete)


@pytest.mark.parametrize(
    ("head", "record", "change", "message"),
    [
        (WORKER, STEP, {"t": float("inf")}, "t must be a finite number, not inf"),
        (WORKER, STEP, {"t": True}, "t must be a finite number, not True"),
        (WORKER, STEP, {"step": -1}, "step must be an integer"),
        (WORKER, STEP, {"step": 2**63}, "step must be an integer"),
        (WORKER, STEP, {"step": 1.0}, "step must be an integer"),
        (WORKER, STEP, {"quorum_id": None}, "quorum_id must be an integer"),
        (WORKER, STEP, {"reason": b"x"}, "reason must be a string"),
        (WORKER, STEP, {"busy_seconds": "1"}, "busy_seconds must be a finite number"),
        (WORKER, STEP, {"values": {b"loss": 1.0}}, "a name in values must be a string"),
        (RELAY, UPLOAD, {"job": ""}, "invalid job name"),
        (RELAY, EVENT, {"detail": {"a": [[[[[[[[1]]]]]]]]}}, "detail is nested too deeply"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(
    head: BatchHead, record: Record, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadBatchError, match=message):
        read(head, {**plain(record), **change})


def test_long_texts_and_times_are_cut_and_values_that_are_no_numbers_left_out() -> None:
    change = {"reason": "x" * 5000, "seconds": 1e12, "heal_seconds": -1, "values": {"a" * 99: 1, "b": float("nan")}}
    (step,) = read(WORKER, {**plain(STEP), **change})
    assert isinstance(step, StepRecord)
    assert (len(step.reason), step.seconds, step.heal_seconds) == (MAX_TEXT, MAX_STEP_SECONDS, 0.0)
    assert step.values == {"a" * 64: 1.0}


def test_a_worker_that_names_no_job_is_refused() -> None:
    with pytest.raises(BadBatchError, match="a worker must name its job"):
        read_batch(pack_batch(BatchHead(source="worker", name="a:1", boot="x", first=1), []))
