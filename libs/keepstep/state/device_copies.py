"""Copies from an accelerator to main memory, through a few pinned buffers.

A direct copy into pageable memory is slow, and pinned memory for a whole state takes seconds to allocate and cannot be
swapped. Each piece therefore goes into a pinned buffer, on a stream of its own, and a thread copies it from there to
its target while the device fills the next buffers.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from keepstep.runtime.devices import begin_gpu_thread
from keepstep_mesh.threads.starting import ThreadPoolExecutor

BUFFERS = 16
BUFFER_BYTES = 16 << 20
"""Size of each pinned buffer: a power of two, to which torch rounds pinned memory up."""
THREADS = min(12, os.cpu_count() or 1)
"""Threads from the buffers to main memory. One is slower than the bus of a GPU: docs/gpus.md has rates."""

Part = tuple[torch.Tensor, torch.Tensor]
"""Bytes in main memory, and the bytes of a buffer that belong there."""


class Mark(Protocol):
    """An event of a device."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


class CopyStream(Protocol):
    """Copies of one device, in order."""

    def flat(self, source: torch.Tensor) -> torch.Tensor:
        """Return the elements of ``source`` as uint8, in one dimension, on the device."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy into a pinned buffer."""

    def mark(self) -> Mark:
        """Return an event that follows all copies that are queued."""


class CudaCopies:
    """The copies of a CUDA device. They follow the work that the current stream has now."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream_of(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def flat(self, source: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return source.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        mark: Mark = self._stream.record_event()
        return mark


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for the copies of ``device``: torch's allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Ring:
    """The pinned buffers of one device. One thread fills them in turn; the threads of ``pool`` empty them."""

    def __init__(
        self, stream: CopyStream, pool: concurrent.futures.Executor, buffer: Callable[[], torch.Tensor]
    ) -> None:
        self._stream = stream
        self._pool = pool
        self._allocate = buffer
        self._count = 0
        self._emptying: collections.deque[concurrent.futures.Future[torch.Tensor]] = collections.deque()
        self._buffer: torch.Tensor | None = None
        self._used = 0
        self._parts: list[Part] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of ``source`` to ``target``: as many bytes in main memory, in one dimension."""
        rest = self._stream.flat(source)
        while len(rest):
            buffer = self._buffer = self._next() if self._buffer is None else self._buffer
            length = min(len(rest), len(buffer) - self._used)
            part = buffer[self._used : self._used + length]
            self._stream.copy(part, rest[:length])
            self._parts.append((target[:length], part))
            self._used += length
            target, rest = target[length:], rest[length:]
            if self._used == len(buffer):
                self._send()

    def finish(self) -> None:
        """Wait until every byte is in main memory."""
        if self._parts:
            self._send()
        while self._emptying:
            self._emptying.popleft().result()

    def _next(self) -> torch.Tensor:
        if self._count < BUFFERS:
            self._count += 1
            return self._allocate()
        return self._emptying.popleft().result()

    def _send(self) -> None:
        assert self._buffer is not None
        work = self._pool.submit(_empty, self._stream.mark(), self._parts, self._buffer)
        self._emptying.append(work)
        self._buffer, self._used, self._parts = None, 0, []


def _empty(filled: Mark, parts: list[Part], buffer: torch.Tensor) -> torch.Tensor:
    filled.synchronize()
    for target, part in parts:
        target.numpy()[:] = part.numpy()  # torch would refuse to write to a tensor of inference mode in this thread
    return buffer


def _pinned() -> torch.Tensor:
    return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)


@contextlib.contextmanager
def device_copies(
    stream: Callable[[torch.device], CopyStream] = CudaCopies, buffer: Callable[[], torch.Tensor] = _pinned
) -> Iterator[Callable[[torch.Tensor, torch.Tensor], None]]:
    """Copy tensors of accelerators to main memory within the block. At its end all copies are complete.

    Args:
        stream: makes the queue of copies of a device.
        buffer: allocates a pinned buffer.

    Yields:
        A function of a target and a source. The target is uint8, in one dimension, and as long as the source.
    """
    rings: dict[torch.device, _Ring] = {}

    def begin() -> None:
        begin_gpu_thread(next(iter(rings)).index)

    with ThreadPoolExecutor(THREADS, "keepstep-staging", begin) as pool:

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            if source.device not in rings:
                rings[source.device] = _Ring(stream(source.device), pool, buffer)
            rings[source.device].copy(target, source)

        yield copy
        for ring in rings.values():
            ring.finish()
