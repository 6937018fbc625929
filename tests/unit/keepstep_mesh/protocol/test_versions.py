"""Two releases, one after the other, understand each other; ``version_7.json`` has what the older one wrote."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import msgpack
import pytest

from keepstep_mesh.errors import VersionError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import WithinGroup
from keepstep_mesh.protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Hello,
    ToLighthouse,
    ToWorker,
    Welcome,
)
from keepstep_mesh.protocol.telemetry_records import Record, read_batch
from tests.support.protocol import record
from tests.support.protocol.record import plain, sample

RECORDED = json.loads(Path(record.__file__).with_name(f"version_{OLDEST_PROTOCOL_VERSION}.json").read_text())
MESSAGES = {row["kind"]: row for row in RECORDED["rows"] if "kind" in row}
if RECORDED["version"] != PROTOCOL_VERSION:
    MESSAGES.pop("rank_ask")  # the ranks of a group have equal versions
BATCHES = {row["batch"]: row for row in RECORDED["rows"] if "batch" in row}
KINDS = {cls.kind: cls for union in (ToLighthouse, ToWorker, WithinGroup) for cls in typing.get_args(union)}
RECORDS = {cls.kind: cls for cls in typing.get_args(Record)}


def test_the_oldest_supported_version_is_recorded() -> None:
    assert RECORDED["version"] == OLDEST_PROTOCOL_VERSION


def with_more(value: Any) -> Any:
    """Return the wire form of a message of a newer peer: each record has one more field."""
    if dataclasses.is_dataclass(value):
        return [*(with_more(getattr(value, one.name)) for one in dataclasses.fields(value)), "of a newer peer"]
    return [with_more(one) for one in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_of_the_release_before_is_read(kind: str) -> None:
    row = MESSAGES[kind]
    message = codec.decode(bytes.fromhex(row["bytes"]))
    fields = plain(message)
    assert as_recorded(fields, row["fields"]) == row["fields"]
    assert [*fields][: len(row["fields"])] == [*row["fields"]], "it reads our fields in its order: append new ones"


def as_recorded(ours: Any, recorded: Any) -> Any:
    """Return ``ours`` without the fields that the release before did not have. Those must have their default."""
    if isinstance(recorded, dict):
        return {name: as_recorded(ours[name], value) for name, value in recorded.items()}
    if isinstance(recorded, list):
        return [as_recorded(*pair) for pair in zip(ours, recorded, strict=True)]
    return ours


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_the_release_before_is_read(kind: str) -> None:
    (one,) = read_batch(bytes.fromhex(BATCHES[kind]["bytes"])).records
    recorded = BATCHES[kind]["fields"]
    assert as_recorded(plain(one), recorded) == recorded


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_a_newer_peer_appended_to_a_message_or_a_part_of_it_are_ignored(kind: str) -> None:
    message = sample(KINDS[kind])
    assert codec.decode(msgpack.packb([kind, *with_more(message)])) == message


@pytest.mark.parametrize("kind", RECORDS)
def test_fields_of_a_newer_sender_are_ignored_in_a_record_and_its_batch(kind: str) -> None:
    row = msgpack.unpackb(bytes.fromhex(BATCHES[kind]["bytes"]))
    newer = {**row, "mood": [1], "records": [{**one, "mood": {"is": "good"}} for one in row["records"]]}
    assert read_batch(msgpack.packb(newer)) == read_batch(msgpack.packb(row))


def test_a_peer_from_before_the_release_before_is_refused_by_name() -> None:
    oldest = OLDEST_PROTOCOL_VERSION
    too_old, older_lighthouse = Hello(oldest - 1, 1, "r0:1", library="keepstep 0.1"), Welcome(oldest - 1, 1, 0, 1, 1, 1)
    with pytest.raises(VersionError, match=rf"worker \(keepstep 0.1\) speaks protocol {oldest - 1}.* least {oldest}: "):
        codec.check_version(too_old)
    with pytest.raises(VersionError, match=rf"lighthouse speaks protocol {oldest - 1}.*{oldest}: update the lighthous"):
        codec.check_welcome(older_lighthouse)
    codec.check_version(Hello(oldest, 1, "r0:1"))
    codec.check_welcome(dataclasses.replace(older_lighthouse, version=oldest))


def test_a_worker_that_is_too_new_is_told_to_update_the_lighthouses() -> None:
    with pytest.raises(VersionError, match="update the lighthouses first"):
        codec.check_version(Hello(PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1, "r0:1"))
    codec.check_version(Hello(PROTOCOL_VERSION + 1, PROTOCOL_VERSION, "r0:1"))
