"""Healing over the process group that averages the gradients, for networks that allow no further port.

The source sends a head, the manifest and the pack in chunks to each joiner; the joiner verifies every chunk. The source
waits for its joiners, for each chunk at most ``timeout``. With ``HTTPTransport`` or a relay it does not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
from torch.distributed.distributed_c10d import Work

from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.process_group.base import ProcessGroup
from keepstep.process_group.group_errors import ProcessGroupError
from keepstep.state.errors import StateMismatch, TransferError, TransferTimeout
from keepstep.state.restoring import Destination
from keepstep.state.staging import StagingArea
from keepstep.state.state_manifest import Manifest, read_manifest
from keepstep.transfer.exchange import Progress
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, Origin, chunk_digest

T = TypeVar("T")

VERSION = 1
HEAD_LENGTH = 3
"""int64: version, step, bytes of the manifest (``NOT_SENT``, ``NEVER_SENT``: the source cannot send its state)."""
NOT_SENT, NEVER_SENT = -1, -2
NO_TIMEOUT = timedelta(0)
"""Tells a work to use the timeout of its process group."""
WINDOW = 2
"""Chunks in flight to each joiner: one is verified while the next arrives."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """Time limits of one transfer."""

    message: timedelta
    """Of each message; 0: that of the process group."""
    deadline: float | None = None
    """Of the whole transfer, on ``time.monotonic``; None: none."""

    def of_message(self) -> timedelta:
        """Return the limit of the next wait."""
        if self.deadline is None:
            return self.message
        left = timedelta(seconds=max(0.001, self.deadline - time.monotonic()))
        return min(self.message, left) if self.message > NO_TIMEOUT else left


class PGTransport(CheckpointTransport[T]):
    """Sends and receives over ``pg``, which the Manager configures.

    A transfer that fails or exceeds its time limit breaks the process group; the Manager configures it again at the
    next step.

    Args:
        pg: the process group of the Manager.
        timeout: longest wait for the first message, and for each chunk of 8 MiB, in a call that passes no timeout.
        device: device of the tensors that ``pg`` sends: ``torch.device("cpu")`` for Gloo, the device of the rank for
            NCCL.
        state_dict: returns the state to receive into if the caller passes no ``into``. None: receive into new memory.

    Raises:
        ValueError: ``timeout`` is not positive.
    """

    accepts_into = True

    def __init__(
        self, pg: ProcessGroup, timeout: timedelta, device: torch.device, state_dict: Callable[[], T] | None = None
    ) -> None:
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, not {timeout}")
        self._pg = pg
        self._timeout = timeout
        self._device = device
        self._state_dict = state_dict
        self._staging = StagingArea(lambda _: None)

    @property
    def via(self) -> str:
        return "process group"

    def metadata(self) -> str:
        """A constant: a joiner finds the source by its rank."""
        return "process group"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta | None = None) -> None:
        """See ``CheckpointTransport``. Returns when all of ``dst_ranks`` have the state.

        Args:
            timeout: longest wait for a message, such as a chunk; 0: that of the process group. Default: that of this
                transport.

        Raises:
            UnsupportedValue: the state has a value that cannot be stored; the error names its path.
            TransferTimeout: a joiner is too slow.
            TransferError: a joiner is gone.
        """
        limits = _Limits(self._timeout if timeout is None else timeout)
        snapshot = self._staging.stage(step, state_dict)
        manifest = snapshot.build_manifest(Origin(step=step))
        parts = [snapshot.pack[start : start + CHUNK_BYTES] for start in range(0, len(snapshot.pack), CHUNK_BYTES)]
        chunks = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
        packed = torch.frombuffer(bytearray(manifest), dtype=torch.uint8)
        self._send(dst_ranks, [_head(step, len(manifest)), packed, *chunks], limits)

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str, *, lasting: bool = False) -> None:
        """See ``CheckpointTransport``. The error of a joiner refers to the log of the source."""
        del reason
        if self._pg.errored() is None:  # else no joiner receives
            head = _head(step, NEVER_SENT if lasting else NOT_SENT)
            self._send(dst_ranks, [head], _Limits(self._timeout))

    def _send(self, dst_ranks: list[int], messages: list[torch.Tensor], limits: _Limits) -> None:
        pending: deque[tuple[Work, torch.Tensor]] = deque()
        try:
            for message in messages:
                there = message.to(self._device)
                while len(pending) > WINDOW * len(dst_ranks):
                    self._wait(pending.popleft()[0], limits)
                for rank in dst_ranks:
                    pending.append((self._pg.send([there], rank), there))
            for work, _ in pending:
                self._wait(work, limits)
        except (ProcessGroupError, TimeoutError) as error:
            self._fail(f"the state was not sent to all of {dst_ranks}", error)

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: timedelta | None = None,
        *,
        into: T | None = None,
        progress: Progress | None = None,
        limit: timedelta | None = None,
    ) -> T:
        """See ``CheckpointTransport``.

        Args:
            src_rank: rank of the source in the process group.
            timeout: longest wait for a message, as in ``send_checkpoint``.
            limit: time limit of the whole transfer. Default: none.
        """
        del metadata
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        limits = _Limits(self._timeout if timeout is None else timeout, deadline)
        if into is None and self._state_dict is not None:
            into = self._state_dict()
        torn = False
        try:
            manifest = self._receive_manifest(src_rank, step, limits)
            destination = Destination(manifest.content, into)
            torn = destination.in_place_bytes > 0
            self._receive_chunks(src_rank, manifest, destination, limits, progress)
            state: T = destination.result()
        except (ProcessGroupError, TimeoutError, TransferError, ManifestError) as error:
            self._fail(f"step {step} was not received from rank {src_rank}", error, torn=torn)
        return state

    def _receive_manifest(self, src_rank: int, step: int, limits: _Limits) -> Manifest:
        head = torch.zeros(HEAD_LENGTH, dtype=torch.int64, device=self._device)
        self._wait(self._pg.recv([head], src_rank), limits)
        version, sent_step, length = head.tolist()
        if version != VERSION:
            raise TransferError(f"unsupported version {version} of the source (supported: {VERSION})")
        if length in (NOT_SENT, NEVER_SENT):
            kind = StateMismatch if length == NEVER_SENT else TransferError
            raise kind("the source cannot send its state; the log of the source has the reason")
        if sent_step != step:
            raise TransferError(f"the source sent step {sent_step} instead of step {step}")
        if not 0 < length <= MAX_MANIFEST_BYTES:
            raise ManifestError(f"invalid length of the manifest: {length} bytes (limit {MAX_MANIFEST_BYTES})")
        packed = torch.empty(length, dtype=torch.uint8, device=self._device)
        self._wait(self._pg.recv([packed], src_rank), limits)
        return read_manifest(packed.cpu().numpy().tobytes())

    def _receive_chunks(
        self, src_rank: int, manifest: Manifest, destination: Destination, limits: _Limits, progress: Progress | None
    ) -> None:
        digests, done = manifest.chunk_digests, 0
        coming: deque[tuple[Work, torch.Tensor, list[memoryview]]] = deque()
        for chunk in range(-WINDOW, len(digests)):
            if chunk + WINDOW < len(digests):
                landing, segments = self._landing(list(destination.segments(chunk + WINDOW)))
                coming.append((self._pg.recv([landing], src_rank), landing, segments))
            if chunk < 0:
                continue
            work, landing, segments = coming.popleft()
            self._wait(work, limits)
            received = landing.cpu().numpy().data
            if chunk_digest(received) != digests[chunk]:
                raise TransferError(f"chunk {chunk} arrived damaged")
            for segment in segments:
                segment[:] = received[: len(segment)]
                received = received[len(segment) :]
            done += len(landing)
            if progress is not None:
                progress(done, destination.pack_bytes)

    def _landing(self, segments: list[memoryview]) -> tuple[torch.Tensor, list[memoryview]]:
        """Return the tensor that receives a chunk, and the memory to copy it to (none if it is received in place)."""
        if len(segments) == 1 and self._device.type == "cpu":
            return torch.frombuffer(segments[0], dtype=torch.uint8), []
        size = sum(len(segment) for segment in segments)
        return torch.empty(size, dtype=torch.uint8, device=self._device), segments

    def _wait(self, work: Work, limits: _Limits) -> None:
        work.wait(limits.of_message())
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()

    def _fail(self, what: str, error: Exception, *, torn: bool = False) -> NoReturn:
        """Abort the process group, so that no late message arrives and the other rank does not wait. Raises."""
        self._pg.abort(f"{what}: {error}")
        kind: type[TransferError] = StateMismatch if isinstance(error, StateMismatch) else TransferError
        kind = TransferTimeout if isinstance(error, TimeoutError) else kind
        raise kind(f"{what}: {error}", torn=torn) from error

    def shutdown(self, wait: bool = True) -> None:  # noqa: ARG002  nothing runs in the background
        """Free the buffers."""
        self._staging.drop()


def _head(step: int, manifest_bytes: int) -> torch.Tensor:
    return torch.tensor([VERSION, step, manifest_bytes], dtype=torch.int64)
