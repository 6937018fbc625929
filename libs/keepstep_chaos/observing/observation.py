"""Read the logs of trainers and lighthouses while they grow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keepstep_chaos.histories.records import files_of
from keepstep_chaos.observing import process_table
from keepstep_chaos.observing.targets import Places, group_of
from keepstep_chaos.recovery import Recovery
from keepstep_chaos.vocabulary import Role

STEP_LOG = "KEEPSTEP_STEP_LOG"
LOST = ("lost", "evicted")
DETECTED = (*LOST, "suspect", "left", "drain", "parted")
MAX_READ_BYTES = 16 << 20
"""Of one log at a time; the rest follows in the next look."""


class Log:
    """A growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the objects in lines that were written since the last call; a line that is no object is skipped."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:  # it was rotated
                    self._offset = 0
                file.seek(self._offset)
                whole, end, _ = file.read(MAX_READ_BYTES).rpartition(b"\n")
        except FileNotFoundError:
            return
        self._offset += len(whole) + len(end)
        for line in whole.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


class Observer:
    """Passes what the logs of ``folders`` say about a job to its ``Recovery``."""

    def __init__(self, job: str, places: Places, recovery: Recovery, folders: Sequence[Path]) -> None:
        self._job = job
        self._places = places
        self._recovery = recovery
        self._folders = folders
        self._logs: dict[Path, Log] = {path: Log(path) for _, path in files_of(folders)} if folders else {}
        self.steps_seen = False
        """Whether a step log has grown."""
        self.differences = 0
        """Comparisons of weights that found a difference."""
        self.comparisons = 0
        self.events_seen = False
        """Whether an event log has grown."""

    def look(self) -> None:
        for path in self._new_files():
            self._logs[path] = Log(path)
        records = [record for log in self._logs.values() for record in log.new() if record.get("job") == self._job]
        for record in sorted(records, key=_time):
            if "kind" in record:
                self.events_seen = True
                self.event(record)
            elif "event" in record:
                self._step(record)

    def _new_files(self) -> list[Path]:
        return [path for _, path in files_of(self._folders) if path not in self._logs] if self._folders else []

    def event(self, record: dict[str, Any]) -> None:
        """Take an event of the lighthouse."""
        kind, at = record["kind"], _time(record)
        if kind in DETECTED and (group := group_of(self._places, record["replica_id"])) is not None:
            self._recovery.detected(group, at)
            if kind in LOST:
                self._recovery.lost(group, f"{kind} at {at:.3f}")
        elif kind == "went_back":
            self._recovery.went_back(int(record["detail"].get("lost_steps", 0)))
        elif kind in ("replicas_verified", "replicas_differ"):
            self.comparisons += 1
            self.differences += kind == "replicas_differ"

    def _step(self, record: dict[str, Any]) -> None:
        group = group_of(self._places, record["replica_id"])
        if group is None:
            return
        event = record["event"]
        if event == "committed":
            self.steps_seen = True
            self._recovery.committed(group, record["step"], _time(record))
        elif event in ("discarded", "retried"):
            self._recovery.discarded(retried=event == "retried")


def _time(record: dict[str, Any]) -> float:
    """Return the Unix time of a line of either kind of log. The clock that wrote it may be ahead."""
    return min(float(record.get("t") or record.get("time") or 0), time.time())


def logs_of(places: Places) -> list[Path]:
    """Return the step logs of the groups and the event logs of the lighthouses, as far as their processes tell."""
    found: list[Path] = []
    for place in places.by_target.values():
        if place.target.role == Role.GROUP and place.pids:
            try:
                program = process_table.program_of(place.pids[0])
            except OSError:
                continue
            if path := program.environment.get(STEP_LOG):
                found.append(Path(program.folder, path))
        elif place.target.role == Role.LIGHTHOUSE and place.program is not None:
            log = place.program.path("--event-log")
            found += [log] if log else []
    return [path for path in dict.fromkeys(found) if path.exists()]


def differing_weights(folder: Path) -> tuple[int, list[str]]:
    """Compare digests that trainers wrote; return the number of compared lines, and sentences about differences.

    Files ``*.digests`` have lines of JSON with ``step``, ``lineage``, and ``digest``: the weights after a commit.
    """
    seen: dict[tuple[int, Any], tuple[str, str]] = {}
    compared, different = 0, list[str]()
    for path in sorted(folder.rglob("*.digests")):
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
                key, digest = (record["step"], record["lineage"]), record["digest"]
            except (ValueError, LookupError, TypeError):
                continue
            first = seen.setdefault(key, (digest, path.name))
            compared += first[1] != path.name
            if first[0] != digest:
                names = f"{path.name} and {first[1]}"
                different.append(f"step {key[0]} of lineage {key[1]}: {names} hold different weights")
    return compared, different
