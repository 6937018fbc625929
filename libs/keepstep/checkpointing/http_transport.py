"""Healing straight from a healthy group: it serves a snapshot over HTTP, the joiner receives it into place."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from keepstep.checkpointing.direct.http_client import Fetch
from keepstep.checkpointing.direct.http_server import CheckpointServer
from keepstep.checkpointing.direct.rate_limiter import RateLimiter
from keepstep.checkpointing.state.restoring import Spare
from keepstep.checkpointing.state.staging import Snapshot, StagingArea
from keepstep.checkpointing.state.state_manifest import build_manifest
from keepstep.checkpointing.transport import CheckpointTransport, Progress
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.addresses import in_url, outward_address
from keepstep_mesh.protocol.manifest import Origin
from keepstep_mesh.security.tokens import ClientToken

T = TypeVar("T")

log = get_logger("keepstep.checkpointing")


class HTTPTransport(CheckpointTransport[T]):
    """One server per transport, on a port of its own; two threads, however many readers.

    Args:
        timeout: longest that a reader waits here for a step to be staged, and that it may take for one chunk of 8 MiB.
        num_chunks: parallel streams of ``recv_checkpoint``, at most 32; 0 and 1: one, on the calling thread.
        hostname: address to serve on and to advertise; default: that of the interface with the default route.
        token: of the job. Readers must show what is derived from it (``ClientToken``), as this transport does.
        uplink: bytes a second that all readers together may take from the network; None: no limit.
    """

    accepts_into = True

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
            raise ValueError(f"num_chunks is a number of streams, not {num_chunks}")
        self._num_chunks = num_chunks
        self._token = ClientToken.of(token)
        self._hostname = hostname or outward_address()
        self._budget = RateLimiter(uplink)
        self._server = CheckpointServer(self._hostname, timeout.total_seconds(), self._token, self._budget)
        if not self._token and not self._server.is_loopback:
            log.warning("live state is served to anyone who can connect: set a token", address=self.metadata())
        self._staging = StagingArea(self._server.cut_off)
        self._hasher = ThreadPoolExecutor(1, "keepstep-checkpoint-hash")
        self._hashing: Future[None] | None = None
        self._staged: Snapshot | None = None
        self._lock = threading.Lock()
        self._fetches: set[Fetch] = set()
        self._spare: Spare | None = None
        """What a failed ``recv_checkpoint`` has left for the next."""
        self._shut_down = False

    @property
    def via(self) -> str:
        return "direct"

    def metadata(self) -> str:
        """``http://host:port``"""
        return f"http://{in_url(self._hostname)}:{self._server.port}"

    def address(self) -> str:
        """Where a step's manifest is, once the step is appended: ``http://host:port/checkpoint/``."""
        return f"{self.metadata()}/checkpoint/"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """See ``CheckpointTransport``. ``dst_ranks`` is for transports that push.

        Raises ``UnsupportedValue`` that names the path of a value that cannot be stored.
        """
        del dst_ranks
        if self._shut_down:
            raise RuntimeError("the transport is shut down")
        self._spare = None  # it has a state that others want: no attempt to get one follows
        self._server.serve(None)
        self._staged = None
        if self._hashing is not None:  # of the snapshot before: long done, unless steps take milliseconds
            self._hashing.result(timeout.total_seconds())
        snapshot = self._staging.stage(step, state_dict)
        snapshot.hold()
        self._hashing = self._hasher.submit(_hash, snapshot)
        self._staged = snapshot
        self.allow_checkpoint(step)

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        """See ``CheckpointTransport``."""
        del dst_ranks
        self._server.refuse(step, reason)

    def allow_checkpoint(self, step: int) -> None:
        """Serves the staged snapshot again, after ``disallow_checkpoint``. ``ValueError`` if it is of another step."""
        if self._staged is None or self._staged.step != step:
            raise ValueError(f"step {step} is not staged: send_checkpoint stages it")
        self._server.serve(self._staged)

    def disallow_checkpoint(self) -> None:
        self._server.serve(None)

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

        What a call that fails has received is kept, in ``into`` or in memory here, and the next call fetches only what
        differs.
        """
        del src_rank
        longest = None if limit is None else limit.total_seconds()
        fetch = self._fetch(metadata, step, timeout.total_seconds(), progress, longest)
        with self._lock:
            self._fetches.add(fetch)
        if self._shut_down:
            fetch.abort("the transport is shut down")
        try:
            state: T = fetch.run(into)
            self._spare = None
            return state
        except BaseException:
            self._spare = fetch.spare
            raise
        finally:
            with self._lock:
                self._fetches.discard(fetch)

    def _fetch(self, metadata: str, step: int, timeout: float, progress: Progress | None, limit: float | None) -> Fetch:
        return Fetch(
            *(metadata, step, timeout),
            token=self._token,
            streams=self._num_chunks,
            progress=progress,
            limit=limit,
            spare=self._spare,
        )

    def source_lost(self, reason: str) -> None:
        """See ``CheckpointTransport``."""
        for fetch in self._fetching():
            fetch.source_lost(reason)

    def abort_receive(self, reason: str) -> None:
        """See ``CheckpointTransport``."""
        for fetch in self._fetching():
            fetch.abort(reason)

    def _fetching(self) -> list[Fetch]:
        with self._lock:
            return list(self._fetches)

    def shutdown(self, wait: bool = True) -> None:
        """Ends every transfer, in both directions. May be called more than once."""
        self._shut_down = True
        self.abort_receive("the transport is shut down")
        self._server.stop(wait)
        self._hasher.shutdown(wait)
        self._staged = self._spare = None
        self._staging.drop()


def _hash(snapshot: Snapshot) -> None:
    try:
        snapshot.manifest.set_result(build_manifest(Origin(step=snapshot.step), snapshot.content_bytes, snapshot.pack))
    except BaseException as error:  # noqa: BLE001  # the readers raise it
        snapshot.manifest.set_exception(error)
    finally:
        snapshot.release()
