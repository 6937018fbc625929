"""Parse lines of event logs and step logs into records. ``parse`` is pure; ``files_of`` and ``lines_of`` read files.

A lighthouse writes an event log with ``--event-log``; trainers write a step log with ``KEEPSTEP_STEP_LOG``. The fields
of a line tell the two apart, so a folder may hold both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIGHEST = 2**63
LONGEST_LINE = 64 * 1024 * 1024
"""Bytes; a quorum of a hundred thousand groups fits."""
LOG_NAME = re.compile(r"\.jsonl(\.\d+)?$")
"""Names of logs in a folder: ``events.jsonl``, and its rotated predecessor ``events.jsonl.1``."""


@dataclass(frozen=True, slots=True)
class Place:
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One line of an event log. Only some kinds have ``quorum_id``, ``names`` and ``owner``."""

    id: int
    epoch: int
    job: str
    kind: str
    replica_id: str
    quorum_id: int | None = None
    names: tuple[str, ...] = ()
    """``quorum``: its members; ``evicted``: the incarnations."""
    owner: str = ""
    """``term``: the process that leads."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of a step log."""

    job: str
    replica_id: str
    group_rank: int
    n: int
    event: str
    step: int
    quorum_id: int
    epoch: int
    lineage: int | str
    participants: int
    members: tuple[str, ...]
    behind: bool
    synchronized: bool
    new_lineage: int | str
    """``committed``: lineage of the resulting state."""
    closed_ms: int
    """``finished``: Unix time at which the job was closed."""


Record = EventRecord | StepRecord


def parse(line: bytes) -> Record:
    """Parse one line. Raises ValueError if it is a line of neither log."""
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid JSON ({error})") from None
    if not isinstance(plain, dict) or not ({"id", "kind"} <= plain.keys() or {"n", "event"} <= plain.keys()):
        raise ValueError("JSON, but of no event log and no step log")
    return record_of(plain)


def record_of(plain: dict[str, Any]) -> Record:
    """Return the record of a decoded line. Raises ValueError as ``parse`` does."""
    return _event(plain) if "kind" in plain else _step(plain)


def _event(plain: dict[str, Any]) -> EventRecord:
    kind = _text(plain, "kind")
    detail = plain.get("detail")
    if not isinstance(detail, dict):
        raise ValueError("'detail' is missing")  # noqa: TRY004 - the line is wrong, not the caller
    named = {"quorum": "members", "evicted": "incarnations"}.get(kind)
    knowing = kind in {"quorum", "evicted", "readmitted", "policy"}
    return EventRecord(
        id=_number(plain, "id"),
        epoch=_number(plain, "epoch"),
        job=_text(plain, "job"),
        kind=kind,
        replica_id=_text(plain, "replica_id"),
        quorum_id=_number(detail, "quorum_id") if knowing else None,
        names=_names(detail, named) if named else (),
        owner=_text(detail, "owner") if kind == "term" else "",
    )


FOLLOWING = {"follows", "caught_up", "gave_up"}
"""Step-log events of a group that takes part without weights: it begins, has them, or goes back to its own."""
HELD = {"started", "loaded", "torn", "diverged", "healed", "committed", "finished"} | FOLLOWING
"""Step-log events with a lineage."""
ANSWERED = {"quorum", "healed", "committed", "retried", "discarded"}
"""Step-log events that follow an answer of a lighthouse."""


def _step(plain: dict[str, Any]) -> StepRecord:
    event = _text(plain, "event")
    if event not in HELD | ANSWERED:
        raise ValueError(f"unknown event {event!r} in a step log")
    lineage = _lineage(plain, "lineage", None if event in HELD else "")
    behind = plain.get("behind") is True
    return StepRecord(
        job=_text(plain, "job"),
        replica_id=_text(plain, "replica_id"),
        group_rank=_number(plain, "group_rank"),
        n=_number(plain, "n"),
        event=event,
        step=_number(plain, "step"),
        quorum_id=_number(plain, "quorum_id"),
        epoch=_number(plain, "epoch") if event in ANSWERED else 0,
        lineage=lineage,
        participants=_number(plain, "participants") if event == "committed" else 0,
        members=_names(plain, "members") if event == "quorum" else (),
        behind=behind,
        synchronized=plain.get("synchronized") is True,
        new_lineage=_lineage(plain, "new_lineage", lineage if behind else plain["quorum_id"]),
        closed_ms=_number(plain, "closed_ms") if event == "finished" else 0,
    )


def _lineage(plain: dict[str, Any], name: str, default: int | str | None) -> int | str:
    value = plain.get(name, default)
    return value if isinstance(value, str) else _number({name: value}, name)


def _number(plain: dict[str, Any], name: str) -> int:
    value = plain.get(name)
    if type(value) is not int or not 0 <= value < HIGHEST:
        raise ValueError(f"invalid {name!r} {value!r}: expected an integer of at least 0")
    return value


def _text(plain: dict[str, Any], name: str) -> str:
    value = plain.get(name)
    if not isinstance(value, str):
        raise ValueError(f"invalid {name!r} {value!r}: expected a string")  # noqa: TRY004 - the line is wrong, not the caller
    return value


def _names(plain: dict[str, Any], name: str) -> tuple[str, ...]:
    value = plain.get(name)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"invalid {name!r} {value!r}: expected a list of names")
    return tuple(value)


# ---- files


def files_of(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return (log, file) for each log among ``paths`` and in folders of ``paths``, each file once.

    A rotated file, such as ``events.jsonl.1``, belongs to the log ``events.jsonl`` and precedes it. Raises OSError if a
    path does not exist or a folder cannot be read.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        path.stat()
        inside = sorted(one for one in path.rglob("*.jsonl*") if LOG_NAME.search(one.name) and one.is_file())
        for one in inside if path.is_dir() else [path]:
            found.setdefault(one.resolve(), one)

    def log_of(path: Path) -> str:
        heir = path.with_suffix("") if path.suffix[1:].isdecimal() else path
        return str(heir if heir.resolve() in found else path)

    logs = [(log_of(path), path) for path in found.values()]
    return sorted(logs, key=lambda one: (one[0], -int(one[1].suffix[1:]) if one[0] != str(one[1]) else 0))


def lines_of(path: Path) -> Iterator[tuple[Place, bytes, bool]]:
    """Yield each non-empty line, and whether it has a line end. Raises OSError."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if text := line.strip():
                yield Place(str(path), number), text, line.endswith(b"\n")
