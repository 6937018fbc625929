"""The embedded store: one SQLite file, one lighthouse. Acknowledged writes survive SIGKILL and a power cut.

SQLite runs in a thread of its own; reads come from memory. The file is locked exclusively: a second lighthouse that
opens it fails at once. Opening the file restarts the leases of a former process.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from keepstep_lighthouse.store.contract import Compare, OutcomeUnknownError, StoreError, Write, WriteFailedError
from keepstep_lighthouse.store.memory_store import MemoryStore
from keepstep_mesh.config.disk_space import free_space, write_failure
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.threads.starting import ThreadPoolExecutor

T = TypeVar("T")
Row = tuple[str, bytes, int, float]
"""Key, value, lease (0: none), time to live of that lease."""

STORE_LOCK_SECONDS = 1.0
"""How long to wait for a lighthouse that is closing the same file."""
JOURNAL_PAGES = 100
"""Pages of 4 KiB in the journal (WAL) after which SQLite empties it: it must not fill a small disk."""
SCHEMA = "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB, lease INTEGER, ttl REAL) WITHOUT ROWID"

log = get_logger("keepstep.lighthouse.store")


class SqliteStore(MemoryStore):
    """Created by ``open``."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepstep-store")
        self._connection: sqlite3.Connection | None = None
        """Used by the thread only. None: memory may differ from the file, which must be read again."""
        self._opened_before = False
        self._expired: set[str] = set()
        """Keys whose lease has expired; deleted from the file with the next write."""
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Open the file. Raise ``StoreError`` if it cannot be used, or another process uses it."""
        try:
            await self._uncancelled(self._read())
        except BaseException:
            self._thread.shutdown()
            raise

    # ---- the contract, where it differs from memory's

    async def get(self, key: str) -> bytes | None:
        await self._uncancelled(self._read())
        return await super().get(key)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        await self._uncancelled(self._read())
        return await super().get_prefix(prefix)

    async def transact(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        return await self._uncancelled(self._transact(compare, writes))

    async def close(self) -> None:
        if self._closed:
            return
        await super().close()
        if self._running:
            await asyncio.wait(self._running)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown()

    # ---- on the loop

    async def _uncancelled(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish a started call even if its caller is cancelled, so that memory and file stay equal."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _read(self) -> None:
        if self._connection is None:
            async with self._turn:
                await self._reload()

    async def _transact(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        async with self._turn:
            await self._reload()
            if not self._allowed(compare, writes):
                return False
            gone = [Write(key, None) for key in self._expired]
            ttls = [self._leases[write.lease] if write.lease else 0.0 for write in writes]
            await self._in_thread(self._commit, [*gone, *writes], [*([0.0] * len(gone)), *ttls])
            self._expired.clear()
            self._apply(writes)
        return True

    async def _reload(self) -> None:
        """Make memory equal to the file, if it may differ. The caller holds the lock."""
        self._check_open()
        if self._connection is not None:
            return
        rows = await self._in_thread(self._connect)
        present = {row[0] for row in rows}
        changed = [Write(key, None) for key in self._values if key not in present]
        for key, value, lease, ttl in rows:
            if lease and lease not in self._leases:
                if self._opened_before:
                    self._expired.add(key)
                    continue
                self._last_lease = max(self._last_lease, lease)
                self._start_lease(lease, ttl)
            if self._values.get(key) != value:
                changed.append(Write(key, value, lease))
        self._opened_before = True
        self._apply(changed)

    def _expire(self, lease: int) -> None:
        self._expired.update(write.key for write in self._end_of(lease))
        super()._expire(lease)

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    # ---- in the thread

    def _connect(self) -> list[Row]:
        connection: sqlite3.Connection | None = None
        try:
            _make_folder(self._path.parent)
            connection = sqlite3.connect(self._path, timeout=STORE_LOCK_SECONDS, isolation_level=None)
            # Exclusive before WAL: SQLite then needs no shared memory file, and no other process can open the file.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {JOURNAL_PAGES}")
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute(SCHEMA)
            connection.execute("COMMIT")
            rows: list[Row] = connection.execute("SELECT key, value, lease, ttl FROM entries").fetchall()
        except (sqlite3.Error, OSError) as error:
            if connection is not None:
                connection.close()
            raise StoreError(f"cannot open the store {self._path}: {self._advice(error)}") from error
        self._connection = connection
        return rows

    def _commit(self, writes: Sequence[Write], ttls: Sequence[float]) -> None:
        connection = self._connection
        if connection is None:
            raise WriteFailedError(f"the store {self._path} is not open")
        try:
            connection.execute("BEGIN IMMEDIATE")
            for write, ttl in zip(writes, ttls, strict=True):
                if write.value is None:
                    connection.execute("DELETE FROM entries WHERE key = ?", (write.key,))
                else:
                    row = (write.key, write.value, write.lease, ttl)
                    connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            # Without a COMMIT, nothing is written; a new connection reads the state of the file.
            self._disconnect()
            raise WriteFailedError(f"nothing was written to {self._path}: {self._advice(error)}") from error
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._disconnect()
            raise OutcomeUnknownError(
                f"the outcome of the last write to {self._path} is unknown: {self._advice(error)}"
            ) from error

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error as error:
                log.warning("closing the store failed", path=str(self._path), error=str(error))

    def _advice(self, error: Exception) -> str:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_BUSY:
            return "another lighthouse is using it; stop that one or give this one a store of its own"
        if code == sqlite3.SQLITE_FULL:
            return f"the disk is full: {free_space(self._path)}"
        if code == sqlite3.SQLITE_NOTADB:
            return "it is not a keepstep store; give another path"
        return write_failure(error, self._path) if isinstance(error, OSError) else str(error)


def _make_folder(folder: Path) -> None:
    """Create ``folder`` in a folder that exists. A mistake in the path must not create a tree of folders."""
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"folder {folder.parent} not found; correct the path, or create the folder first")
    folder.mkdir(exist_ok=True)
