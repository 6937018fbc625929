"""Heal directly from a healthy group, which serves a snapshot over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar

from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.state.restoring import Spare
from keepstep.state.staging import Snapshot, StagingArea
from keepstep.transfer.direct.direct_fetch import DirectChunks
from keepstep.transfer.direct.sending.http_server import CheckpointServer
from keepstep.transfer.exchange import Progress
from keepstep.transfer.state_transfer import ChunkSource, Transfer
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.addresses import in_url, outward_address
from keepstep_mesh.protocol.manifest import Origin
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.threads.starting import ThreadPoolExecutor

T = TypeVar("T")

log = get_logger("keepstep.checkpointing")


class HTTPTransport(CheckpointTransport[T]):
    """Serves snapshots over HTTP on its own port, and receives the snapshots of other groups.

    The server has two threads, regardless of the number of readers.

    Args:
        timeout: longest time that a reader waits for a step to be staged, and longest time without progress of a
            reader.
        num_chunks: parallel streams of ``recv_checkpoint``, at most 32. 0 and 1: one, on the calling thread.
        hostname: address to serve on and to advertise. Default: that of the interface with the default route.
        token: token of the job; readers must present the token that is derived from it. None: any reader is served.
        uplink: limit for all readers together, in bytes per second. None: no limit.

    Raises:
        ValueError: ``timeout`` is not positive, ``num_chunks`` negative, or ``uplink`` not positive.
    """

    accepts_into = True
    receives_in_background = True

    def __init__(
        self,
        timeout: timedelta,
        num_chunks: int,
        hostname: str | None = None,
        token: str | ClientToken | None = None,
        uplink: float | None = None,
    ) -> None:
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, not {timeout}")
        if num_chunks < 0:
            raise ValueError(f"num_chunks must be at least 0, not {num_chunks}")
        self._num_chunks = num_chunks
        self._hostname = hostname or outward_address()
        self.token = ClientToken.of(token)
        self.rate_limiter = RateLimiter(uplink)
        self.server = CheckpointServer(self._hostname, timeout.total_seconds(), self.token, self.rate_limiter)
        if not self.token and not self.server.is_loopback:
            log.warning("live state is served to anyone who can connect: set a token", address=self.metadata())
        self._staging = StagingArea(self.server.disconnect_readers)
        self._hasher = ThreadPoolExecutor(1, "keepstep-checkpoint-hash")
        self._hashing: Future[None] | None = None
        self.staged: Snapshot | None = None
        """The snapshot of the last ``send_checkpoint``."""
        self._lock = threading.Lock()
        self._transfers: set[Transfer] = set()
        """In progress."""
        self._spare: Spare | None = None
        """Memory that a failed ``recv_checkpoint`` left for the next one."""
        self._shut_down = False

    @property
    def via(self) -> str:
        return "direct"

    def metadata(self) -> str:
        """``http://host:port``"""
        return f"http://{in_url(self._hostname)}:{self.server.port}"

    def address(self) -> str:
        """URL of a step's manifest, without the step: ``http://host:port/checkpoint/``."""
        return f"{self.metadata()}/checkpoint/"

    def copy_early(self, step: int, state_dict: T) -> None:
        """See ``CheckpointTransport``."""
        if not self._shut_down:
            self._staging.begin(step, state_dict)

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """See ``CheckpointTransport``. ``dst_ranks`` is ignored.

        Raises:
            UnsupportedValue: the state has a value that cannot be stored; the error names its path.
        """
        del dst_ranks
        if self._shut_down:
            raise RuntimeError("the transport is shut down")
        self._spare = None  # this group has the state: it will not receive it
        self.server.serve(None)
        self.staged = None
        if self._hashing is not None:  # of the previous snapshot; done, unless steps take milliseconds
            self._hashing.result(timeout.total_seconds())
        snapshot = self._staging.stage(step, state_dict)
        snapshot.hold()
        self._hashing = self._hasher.submit(_hash, snapshot)
        self.staged = snapshot
        self.allow_checkpoint(step)

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str, *, lasting: bool = False) -> None:
        """See ``CheckpointTransport``."""
        del dst_ranks
        self.server.refuse(step, reason, lasting=lasting)

    def allow_checkpoint(self, step: int) -> None:
        """Serve the staged snapshot again, after ``disallow_checkpoint``.

        Args:
            step: of the snapshot.

        Raises:
            ValueError: the snapshot of ``step`` is not staged.
        """
        if self.staged is None or self.staged.step != step:
            raise ValueError(f"step {step} is not staged: send_checkpoint stages it")
        self.server.serve(self.staged)

    def disallow_checkpoint(self) -> None:
        """See ``CheckpointTransport``."""
        self.server.serve(None)

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: timedelta,
        *,
        into: T | None = None,
        progress: Progress | None = None,
        limit: timedelta | None = None,
    ) -> T:
        """See ``CheckpointTransport``.

        A call that fails keeps what it received, in ``into`` or in memory of this transport. The next call fetches only
        what differs.
        """
        del src_rank
        chunks = partial(DirectChunks, streams=self._num_chunks)
        return self.receive(metadata, step, timeout, chunks, into=into, progress=progress, limit=limit)

    def receive(
        self,
        metadata: str,
        step: int,
        timeout: timedelta,
        chunks: Callable[[Transfer], ChunkSource],
        *,
        into: T | None,
        progress: Progress | None,
        limit: timedelta | None,
    ) -> T:
        """Receive as ``recv_checkpoint`` does, from the source of chunks that ``chunks`` returns for the transfer."""
        transfer = Transfer(
            *(metadata, step, timeout.total_seconds(), chunks),
            token=self.token,
            progress=progress,
            limit=None if limit is None else limit.total_seconds(),
            spare=self._spare,
        )
        with self._lock:
            self._transfers.add(transfer)
        if self._shut_down:
            transfer.abort("the transport is shut down")
        try:
            state: T = transfer.run(into)
            self._spare = None
            return state
        except BaseException:
            self._spare = transfer.take_spare()
            raise
        finally:
            with self._lock:
                self._transfers.discard(transfer)

    def keep_present(self) -> None:
        """See ``CheckpointTransport``."""
        self._spare = {}

    def source_lost(self, reason: str) -> None:
        """See ``CheckpointTransport``."""
        for transfer in self._in_progress():
            transfer.source_lost(reason)

    def abort_receive(self, reason: str) -> None:
        """See ``CheckpointTransport``."""
        for transfer in self._in_progress():
            transfer.abort(reason)

    def _in_progress(self) -> list[Transfer]:
        with self._lock:
            return list(self._transfers)

    def shutdown(self, wait: bool = True) -> None:
        """End all transfers, in both directions. May be called more than once.

        Args:
            wait: wait until readers have ended.
        """
        self._shut_down = True
        self.abort_receive("the transport is shut down")
        self.server.stop(wait)
        self._hasher.shutdown(wait)
        self.staged = self._spare = None
        self._staging.close()


def _hash(snapshot: Snapshot) -> None:
    try:
        snapshot.manifest.set_result(snapshot.build_manifest(Origin(step=snapshot.step)))
    except BaseException as error:  # noqa: BLE001  # readers raise it
        snapshot.manifest.set_exception(error)
    finally:
        snapshot.release()
