"""Heals of a job's groups and uploads of its checkpoints. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.protocol.telemetry_records import MAX_TEXT, EventRecord, UploadRecord
from keepstep_metrics.history.events import integer, number

MAX_TRANSFERS = 500


@dataclass(slots=True)
class Transfer:
    kind: str
    """``heal`` or ``upload``."""
    name: str
    """Stable name of the group that heals, or id of the checkpoint."""
    step: int
    began: float
    """Unix time, as ``ended``."""
    source: str = ""
    """Stable name of the group that a heal copies from; empty: unknown."""
    via: str = ""
    """How a heal travels, or the name of the relay."""
    bytes_done: int = 0
    bytes_total: int = 0
    bytes_per_second: float = 0.0
    seconds_left: float | None = None
    ended: float | None = None
    error: str = ""


class TransferLog:
    def __init__(self) -> None:
        self._all: deque[Transfer] = deque(maxlen=MAX_TRANSFERS)

    def __iter__(self) -> Iterator[Transfer]:
        """Iterate from the oldest."""
        return iter(self._all)

    def begin_heal(self, name: str, record: EventRecord) -> None:
        detail = record.detail
        source = name_of(str(detail.get("source", "")))
        self._all.append(Transfer("heal", name, integer(detail.get("step")), record.t, source))

    def end_heal(self, name: str, record: EventRecord) -> None:
        """End the newest heal of the group ``name``, if one is open."""
        detail = record.detail
        for one in reversed(self._all):
            if one.name == name and one.kind == "heal" and one.ended is None:
                one.ended, one.error = record.t, str(detail.get("reason", ""))[:MAX_TEXT]
                one.bytes_done = integer(detail.get("bytes"))
                one.bytes_total = max(one.bytes_total, one.bytes_done)
                one.via = str(detail.get("via", ""))
                one.bytes_per_second = number(detail.get("bytes_per_second"))
                one.seconds_left = None
                return

    def update_upload(self, relay: str, record: UploadRecord) -> None:
        key = ("upload", record.checkpoint, relay, record.began)
        found = next((one for one in reversed(self._all) if (one.kind, one.name, one.via, one.began) == key), None)
        if found is None:
            found = Transfer("upload", record.checkpoint, record.step, record.began, via=relay)
            self._all.append(found)
        found.bytes_done, found.bytes_total = record.bytes_done, record.bytes
        found.bytes_per_second = record.bytes_per_second
        if record.state != "uploading":
            found.ended = record.t
            found.error = record.error

    def forget_after(self, t: float) -> None:
        """See ``Job.forget_after``."""
        self._all = deque((one for one in self._all if max(one.began, one.ended or 0.0) <= t), MAX_TRANSFERS)

    def dump(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self._all]

    def load(self, dumped: list[dict[str, Any]]) -> None:
        self._all.extend(Transfer(**one) for one in dumped)
