"""Write one message of each kind, as the keepstep that is imported encodes it, with the values of its fields, as JSON.

Record a version before the first change after it, and keep the file while that version is supported:

PYTHONPATH=libs python tests/support/protocol/record.py > tests/support/protocol/version_7.json
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from keepstep_mesh.protocol import codec, group_messages, messages, telemetry_records

NUMBERS = itertools.count(1)


def sample(hint: Any, name: str = "") -> Any:
    """Return a value of this type, unlike the default of any field."""
    number, origin = next(NUMBERS), typing.get_origin(hint)
    if origin is typing.Annotated:
        return sample(typing.get_args(hint)[0], name)
    if origin is typing.Literal:
        return typing.get_args(hint)[0]
    if origin in (types.UnionType, typing.Union):
        return sample(next(one for one in typing.get_args(hint) if one is not type(None)), name)
    if origin is tuple:
        return (sample(typing.get_args(hint)[0], name),)
    if origin is dict:
        return {name: number + 0.5}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint, include_extras=True)
        return hint(**{one.name: sample(hints[one.name], one.name) for one in dataclasses.fields(hint)})
    return {int: number, float: number + 0.5, bool: name != "allow_heal", str: f"{name}-{number}"}.get(hint, [number])


def plain(value: Any) -> Any:
    """Return what JSON has for a message."""
    if dataclasses.is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


def rows() -> Iterator[dict[str, Any]]:
    kinds = (messages.ToLighthouse, messages.ToWorker, group_messages.WithinGroup)
    for cls in itertools.chain(*map(typing.get_args, kinds)):
        one = sample(cls)
        yield {"kind": cls.kind, "bytes": codec.encode(one).hex(), "fields": plain(one)}
    for cls in typing.get_args(telemetry_records.Record):
        one = sample(cls)
        by_service = hasattr(one, "job")
        one = dataclasses.replace(one, **({"job": "job"} if by_service else {}))
        head = telemetry_records.BatchHead(
            source="lighthouse" if by_service else "worker", name="r0:1", job="job", boot="b1", first=1
        )
        body = telemetry_records.pack_batch(head, [telemetry_records.pack_record(one)])
        yield {"batch": cls.kind, "bytes": body.hex(), "fields": plain(one)}


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(row) for row in rows())
    sys.stdout.write(f'{{"version": {messages.PROTOCOL_VERSION}, "rows": [\n{lines}\n]}}\n')
