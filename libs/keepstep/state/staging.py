"""Snapshots of the live state in reused buffers. A buffer is never written while a reader holds it.

At most two buffers exist: the snapshot that is served, and the previous one until its readers finish. If a third is
needed, the readers of the oldest are disconnected; its memory is freed when the last reader has released it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from keepstep.state.early_copy import COPY_SECONDS, EarlyCopy, Unwritten
from keepstep.state.pack_layout import PackLayout, describe
from keepstep.state.state_manifest import build_manifest
from keepstep_mesh.protocol.manifest import Origin, chunk_digests
from keepstep_mesh.protocol.state_content import pack_content

MAX_BUFFERS = 2


class Snapshot:
    """The bytes of one step. The buffer is reused when no caller of ``hold`` is left that did not ``release`` it."""

    def __init__(
        self,
        step: int,
        buffer: torch.Tensor,
        pack_bytes: int,
        content_bytes: bytes,
        area: StagingArea,
        whole: Future[str] | None = None,
    ) -> None:
        self.step = step
        self.content_bytes = content_bytes
        self.pack = buffer.numpy().data[:pack_bytes]
        self.manifest: Future[bytes] = Future()
        """Set when the chunks are hashed."""
        self.buffer = buffer
        self._area = area
        self._whole = whole

    def build_manifest(self, origin: Origin) -> bytes:
        """Hash the bytes (about 30 GB/s; releases the GIL), and return their manifest. Raises ``UnsupportedValue``."""
        return build_manifest(origin, self.content_bytes, chunk_digests([self.pack]))

    def torn(self) -> str:
        """Wait until all bytes are copied. Return why they are not those of one moment, or an empty text."""
        return "" if self._whole is None else self._whole.result(COPY_SECONDS)

    def hold(self) -> bool:
        """Keep the buffer until ``release``. Returns False if the snapshot is already freed."""
        return self._area.hold(self)

    def release(self) -> None:
        """Undo one ``hold``."""
        self._area.release(self)


class StagingArea:
    """Buffers for snapshots.

    Args:
        disconnect: called with a snapshot, on the thread of ``stage``, when its readers must be disconnected.
    """

    def __init__(self, disconnect: Callable[[Snapshot], None]) -> None:
        self._disconnect = disconnect
        self._lock = threading.Lock()
        self._holds: dict[Snapshot, int] = {}
        self._current: Snapshot | None = None
        self._free: torch.Tensor | None = None
        self._early: EarlyCopy | None = None
        self._unwritten = Unwritten()

    def begin(self, step: int, state: Any) -> None:
        """Begin to copy a state that ``stage`` will ask for soon, in the background. From any thread.

        Args:
            step: of the state.
            state: of the same tensors.
        """
        with self._lock:
            last = self._early
            self._early = EarlyCopy(step, state, partial(self._take_early, last))

    def _take_early(self, last: EarlyCopy | None, length: int) -> torch.Tensor | None:
        """Return a buffer without disturbing a reader; None: readers have all that may exist."""
        buffer = last.stop() if last is not None else None
        with self._lock:
            if buffer is None and (self._free is not None or len(self._holds) < MAX_BUFFERS):
                buffer, self._free = self._free, None
            elif buffer is None:
                return None
        return buffer if buffer is not None and len(buffer) >= length else torch.empty(length, dtype=torch.uint8)

    def stage(self, step: int, state: Any, *, late: bool = False) -> Snapshot:
        """Copy ``state``, and drop the previous snapshot. Never waits for a reader.

        Args:
            step: of the state.
            state: to copy.
            late: tensors that no pass writes to may be copied until ``settle``. Wait for ``Snapshot.torn`` then.

        Raises:
            UnsupportedValue: the state cannot be stored; no snapshot is staged.
        """
        self.settle()
        self.drop()
        layout = describe(state)
        pack_bytes = layout.content.positions()[-1]
        buffer, there = self._copied_early(step, layout, pack_bytes)
        try:
            pack = buffer[:pack_bytes]
            whole = None
            if late:
                whole = self._unwritten.begin(layout, pack, there)
            else:
                layout.copy_into(pack, there)
            snapshot = Snapshot(step, buffer, pack_bytes, pack_content(layout.content), self, whole)
        except BaseException:
            with self._lock:
                self._free = buffer
            raise
        with self._lock:
            self._holds[snapshot] = 1
            self._current = snapshot
        return snapshot

    def _copied_early(self, step: int, layout: PackLayout, length: int) -> tuple[torch.Tensor, frozenset[int]]:
        """Return a buffer, and the regions of ``layout`` that it holds already."""
        with self._lock:
            early, self._early = self._early, None
        if early is None:
            return self._take(length), frozenset()
        buffer, there = early.right(layout) if early.step == step else (early.stop(), frozenset())
        if buffer is None or len(buffer) < length:
            return self._take(length), frozenset()
        return buffer, there

    def settle(self) -> None:
        """Wait until nothing is copied any more from the state that was staged last. Call it before the state changes.

        On the thread of ``stage``.
        """
        self._unwritten.settle()

    def close(self) -> None:
        """Drop the current snapshot, and end copies that run."""
        self._unwritten.close()
        with self._lock:
            early, self._early = self._early, None
        if early is not None:
            early.stop()
        self.drop()

    def drop(self) -> None:
        """Drop the current snapshot. Its buffer is reused when its readers have finished."""
        with self._lock:
            snapshot, self._current = self._current, None
        if snapshot is not None:
            self.release(snapshot)

    def hold(self, snapshot: Snapshot) -> bool:
        """See ``Snapshot.hold``."""
        with self._lock:
            if snapshot not in self._holds:
                return False
            self._holds[snapshot] += 1
            return True

    def release(self, snapshot: Snapshot) -> None:
        """See ``Snapshot.release``."""
        with self._lock:
            if snapshot not in self._holds:
                return
            self._holds[snapshot] -= 1
            if self._holds[snapshot] == 0:
                del self._holds[snapshot]
                self._free = snapshot.buffer

    def _take(self, length: int) -> torch.Tensor:
        with self._lock:
            buffer, self._free = self._free, None
            oldest = next(iter(self._holds)) if len(self._holds) >= MAX_BUFFERS else None
            if oldest is not None:
                del self._holds[oldest]
        if oldest is not None:
            self._disconnect(oldest)
        if buffer is not None and len(buffer) >= length:
            return buffer
        del buffer, oldest
        return torch.empty(length, dtype=torch.uint8)
