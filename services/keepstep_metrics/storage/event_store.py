"""The history in one SQLite file. An acknowledged batch survives SIGKILL.

Each batch is written to a journal before its request is answered, many batches in one transaction. A periodic snapshot
of the core replaces the journal before it. A start loads the snapshot and applies the journal. Events have their own
table, where they stay longer than in memory. SQLite runs in its own thread.

The file is synced at each snapshot, not at each batch: a power cut may lose the batches since (SQLite's WAL in mode
NORMAL: https://sqlite.org/pragma.html#pragma_synchronous).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from keepstep_mesh.config.disk_space import free_space, write_failure
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.threads.starting import ThreadPoolExecutor
from keepstep_metrics.history.events import JOB_DELETED, Event

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS journal (n INTEGER PRIMARY KEY, t REAL, body BLOB);
CREATE TABLE IF NOT EXISTS snapshot (one INTEGER PRIMARY KEY CHECK (one = 1), form INTEGER, upto INTEGER, body BLOB);
CREATE TABLE IF NOT EXISTS events (
  id INTEGER PRIMARY KEY, job TEXT, t REAL, event TEXT, name TEXT, sentence TEXT, detail TEXT
);
CREATE INDEX IF NOT EXISTS events_of_job ON events (job, id);
CREATE INDEX IF NOT EXISTS events_by_time ON events (t);
"""
FORM = 4
"""Format of a snapshot. A snapshot of a format that is not in ``KNOWN_FORMS`` is dropped; its events stay."""
KNOWN_FORMS = (2, FORM)
"""Those of the release before and of this one."""
SNAPSHOT_DEPTH = 4
"""Nesting of a snapshot down to a group: snapshot, jobs, job, groups."""
MAX_PENDING_BYTES = 64 << 20
"""Batches in memory that wait for the disk."""

log = get_logger("keepstep.metrics.store")


class StoreError(KeepstepError):
    """The file cannot be used, or a write failed."""


class Store:
    """Created by ``open``. ``path`` None: in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepstep-metrics")
        self._connection: sqlite3.Connection
        self._pending: list[tuple[int, float, bytes]] = []
        self._events: list[tuple[str, Event]] = []
        self._pending_bytes = 0
        self._last = 0
        self._written = asyncio.Condition()
        self._written_upto = 0
        self._snapshot: tuple[int, dict[str, Any]] | None = None
        self._forget_before: float | None = None
        self._wake = asyncio.Event()
        self.trouble: str | None = None
        """Why the last write failed; None: it did not."""
        self._failures = LogLimiter(max_keys=2)
        self.last_event = 0
        """Number of the last stored event at the start."""

    @classmethod
    async def open(cls, path: Path | None) -> Store:
        """Open or create the file. Raises ``StoreError``."""
        store = cls(path)
        try:
            await store._in_thread(store._connect)
        except (sqlite3.Error, OSError) as error:
            store._thread.shutdown()
            raise store._unusable(error) from error
        return store

    def _unusable(self, error: Exception) -> StoreError:
        return StoreError(f"cannot use the metrics data {self._path}: {self._advice(error)}; use another --data-dir")

    def _advice(self, error: Exception) -> str:
        if self._path is None:
            return str(error)
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
            return f"the disk is full: {free_space(self._path)}"
        return write_failure(error, self._path) if isinstance(error, OSError) else str(error)

    async def close(self) -> None:
        await self._in_thread(self._connection.close)
        self._thread.shutdown()

    # ---- at the start

    async def load(self) -> tuple[dict[str, Any] | None, list[tuple[float, bytes]]]:
        """Return the snapshot, and the later batches with their arrival times. Raises ``StoreError``."""
        try:
            return await self._in_thread(self._load)
        except (sqlite3.Error, OSError, ValueError, msgpack.UnpackException) as error:
            raise self._unusable(error) from error

    # ---- writing

    @property
    def is_full(self) -> bool:
        return self._pending_bytes > MAX_PENDING_BYTES

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    def add(self, t: float, body: bytes, events: list[tuple[str, Event]]) -> None:
        """Queue a batch and its events for writing; see ``written``."""
        self._last += 1
        self._pending.append((self._last, t, body))
        self._pending_bytes += len(body)
        self._events += events
        self._wake.set()

    async def written(self, seconds: float) -> None:
        """Return when everything added until now is on disk.

        Raises:
            StoreError: The write failed, or took longer than ``seconds``. The store keeps the batch and retries.
        """
        upto = self._last
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._written:
                await self._written.wait_for(lambda: self._written_upto >= upto or self.trouble is not None)
        if self._written_upto < upto:
            raise StoreError(self.trouble or f"no write to disk succeeded within {seconds:g} s")

    def snapshot(self, plain: dict[str, Any]) -> None:
        """Queue a snapshot of the core, which includes everything added until now. Do not change ``plain`` any more."""
        self._snapshot = self._last, plain
        self._wake.set()

    def forget_events(self, before: float) -> None:
        """Queue the deletion of events before ``before`` (Unix time)."""
        self._forget_before = before
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled; then call ``flush`` for the rest."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not await self._write():
                await asyncio.sleep(1.0)
                self._wake.set()

    async def flush(self) -> None:
        await self._write()

    async def _write(self) -> bool:
        rows, self._pending = self._pending, []
        events, self._events = self._events, []
        try:
            if rows:
                await self._in_thread(self._commit, rows, events)
        except BaseException as error:
            # A cancelled transaction may have been committed. It is repeated: its rows replace themselves.
            self._pending = rows + self._pending
            self._events = events + self._events
            if not isinstance(error, sqlite3.Error | OSError):
                raise
            self.trouble = f"cannot write to {self._path}: {self._advice(error)}"
            self._log_failure("write failed; retrying", error)
            async with self._written:
                self._written.notify_all()
            await self._tidy(with_snapshot=False)  # a snapshot would include batches whose events are not written
            return False
        self.trouble = None
        self._pending_bytes -= sum(len(body) for _, _, body in rows)
        if rows:
            async with self._written:
                self._written_upto = rows[-1][0]
                self._written.notify_all()
        await self._tidy()
        return True

    async def _tidy(self, *, with_snapshot: bool = True) -> None:
        """Forget events, and write the queued snapshot. If that fails, the journal continues: it needs less space."""
        snapshot = None
        if with_snapshot:
            snapshot, self._snapshot = self._snapshot, None
        before, self._forget_before = self._forget_before, None
        try:
            if snapshot is not None or before is not None:
                await self._in_thread(self._tidied, snapshot, before)
        except (sqlite3.Error, OSError) as error:
            self._log_failure("cleanup failed; the journal continues", error)

    def _log_failure(self, what: str, error: Exception) -> None:
        if self._failures.take(time.monotonic(), what) is not None:
            log.error(what, path=str(self._path), reason=self._advice(error))

    # ---- events

    async def events(self, job: str, after: int, limit: int) -> list[Event]:
        """Return the oldest events of ``job`` with a number above ``after``, at most ``limit``."""
        return await self._in_thread(self._events_after, job, after, limit)

    async def newest_events(self, job: str, limit: int) -> list[Event]:
        """Return the newest events of ``job``, the oldest first."""
        return await self._in_thread(self._newest_events, job, limit)

    async def events_between(
        self, job: str, since: float, until: float, limit: int, kinds: Collection[str] = ()
    ) -> list[Event]:
        """Return the newest events of ``job`` between two times (Unix), the oldest first. No ``kinds``: all kinds."""
        return await self._in_thread(self._events_between, job, since, until, limit, tuple(kinds))

    # ---- in the thread

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _connect(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self._path or ":memory:", timeout=2.0, isolation_level=None, check_same_thread=False
        )
        try:
            if self._path is not None:
                # Exclusive before WAL: a second service fails to open the file.
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("BEGIN EXCLUSIVE")
                connection.execute("COMMIT")
            connection.executescript(SCHEMA)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _load(self) -> tuple[dict[str, Any] | None, list[tuple[float, bytes]]]:
        found = self._connection.execute("SELECT form, upto, body FROM snapshot").fetchone()
        upto, plain = 0, None
        if found is not None:
            upto = found[1]
            if found[0] in KNOWN_FORMS:
                plain = msgpack.unpackb(found[2], strict_map_key=False)
            else:
                log.warning("dropped the history of another release; events are kept", path=str(self._path))
        self.last_event = self._connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()[0]
        rows = self._connection.execute("SELECT n, t, body FROM journal WHERE n > ? ORDER BY n", (upto,)).fetchall()
        self._last = self._written_upto = rows[-1][0] if rows else upto
        return plain, [(t, body) for _, t, body in rows]

    def _commit(self, rows: list[tuple[int, float, bytes]], events: list[tuple[str, Event]]) -> None:
        with self._transaction() as connection:
            if self._path is not None:
                connection.executemany("INSERT OR REPLACE INTO journal VALUES (?, ?, ?)", rows)
            connection.executemany(
                "INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (one.id, job, one.t, one.event, one.name, one.sentence, json.dumps(one.detail))
                    for job, one in events
                ),
            )
            gone = ((job, one.id) for job, one in events if one.event == JOB_DELETED)
            connection.executemany("DELETE FROM events WHERE job = ? AND id < ?", gone)

    def _tidied(self, snapshot: tuple[int, dict[str, Any]] | None, before: float | None) -> None:
        body = b"" if snapshot is None else _packed(snapshot[1])
        with self._transaction() as connection:
            if before is not None:
                connection.execute("DELETE FROM events WHERE t < ?", (before,))
            if snapshot is not None and self._path is not None:
                connection.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?)", (FORM, snapshot[0], body))
                connection.execute("DELETE FROM journal WHERE n <= ?", (snapshot[0],))

    def _transaction(self) -> sqlite3.Connection:
        """Begin a transaction. Used as a context: commit at its end, roll back on an error."""
        self._connection.execute("BEGIN IMMEDIATE")
        return self._connection

    def _events_after(self, job: str, after: int, limit: int) -> list[Event]:
        return [*self._read("job = ? AND id > ? ORDER BY id LIMIT ?", job, after, limit)]

    def _newest_events(self, job: str, limit: int) -> list[Event]:
        return [*self._read("job = ? ORDER BY id DESC LIMIT ?", job, limit)][::-1]

    def _events_between(self, job: str, since: float, until: float, limit: int, kinds: tuple[str, ...]) -> list[Event]:
        of_kinds = f"AND event IN ({', '.join('?' * len(kinds))})" if kinds else ""
        where = f"job = ? AND t >= ? AND t < ? {of_kinds} ORDER BY id DESC LIMIT ?"
        return [*self._read(where, job, since, until, *kinds, limit)][::-1]

    def _read(self, where: str, *values: object) -> Iterator[Event]:
        query = f"SELECT id, t, event, name, sentence, detail FROM events WHERE {where}"  # noqa: S608 - ours
        for id_, t, event, name, sentence, detail in self._connection.execute(query, values):
            yield Event(id_, t, event, name, sentence, json.loads(detail))


def _packed(plain: dict[str, Any]) -> bytes:
    """Pack a snapshot, group by group: msgpack lets no other thread run while it packs a value."""
    packer = msgpack.Packer(autoreset=False)

    def pack(value: Any, depth: int) -> None:
        if depth and isinstance(value, dict):
            packer.pack_map_header(len(value))
            for key, one in value.items():
                packer.pack(key)
                pack(one, depth - 1)
        elif depth and isinstance(value, list):
            packer.pack_array_header(len(value))
            for one in value:
                pack(one, depth - 1)
        else:
            packer.pack(value)

    pack(plain, SNAPSHOT_DEPTH)
    packed: bytes = packer.bytes()
    return packed
