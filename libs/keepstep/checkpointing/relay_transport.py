"""Healing through relays: the healthy groups together upload the state once, and any number of joiners fetches it.

Every source also serves its snapshot. Without a relay, several joiners of one source take each chunk from it once and
pass it on to each other; a single joiner receives the state as with ``HTTPTransport``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import partial
from typing import TypeVar

from keepstep.checkpointing.http_transport import HTTPTransport
from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.connection.http_connection import Endpoint
from keepstep.relay_client.relay_link import Credentials
from keepstep.transfer.direct.direct_fetch import DirectChunks
from keepstep.transfer.exchange import Exchange, Progress
from keepstep.transfer.peer_choice import SOURCE
from keepstep.transfer.relayed.relay_fetch import RelayedChunks
from keepstep.transfer.relayed.relay_upload import Upload
from keepstep.transfer.state_transfer import ChunkSource, Transfer
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import ClientToken

T = TypeVar("T")

log = get_logger("keepstep.checkpointing")


class RelayTransport(CheckpointTransport[T]):
    """The Manager's default transport: an ``HTTPTransport``, whose chunks also travel through relays and joiners.

    Args:
        timeout: see ``HTTPTransport``; also the time limit of an upload.
        relays: returns the addresses of the relays, before each transfer. Empty: transfers are direct.
        num_chunks: parallel streams of a direct transfer.
        hostname: see ``HTTPTransport``.
        token: see ``HTTPTransport``. A relay receives the token that is derived from it for the address of the relay.
        tls: certificates for relays at https addresses. None: the certificates of the system.
        uplink: see ``HTTPTransport``; also limits uploads.
    """

    accepts_into = True
    receives_in_background = True

    def __init__(
        self,
        timeout: timedelta,
        relays: Callable[[], Iterable[str]],
        num_chunks: int = 4,
        hostname: str | None = None,
        token: str | ClientToken | None = None,
        tls: TlsFiles | None = None,
        uplink: float | None = None,
    ) -> None:
        self._credentials = Credentials(ClientToken.of(token), tls or TlsFiles())
        self.direct: HTTPTransport[T] = HTTPTransport(timeout, num_chunks, hostname, token, uplink)
        self._num_chunks = num_chunks
        self._relays = relays
        self._exchange: Exchange | None = None
        self._brought: AbstractSet[str] = frozenset()
        """Senders of chunks of the current or last ``recv_checkpoint``; empty if it is direct."""
        self._by_relay = False
        self._uploads: list[Upload] = []
        """The newest upload, and older ones that are about to end."""

    @property
    def via(self) -> str:
        """See ``CheckpointTransport``: ``direct``, ``relay``, or ``peers`` for other joiners."""
        if not self._brought - {SOURCE}:
            return "direct"
        return "relay" if self._by_relay else "peers"

    @property
    def needs_all_sources(self) -> bool:
        """See ``CheckpointTransport``."""
        return bool(self._known_relays())

    def prepare(self, exchange: Exchange) -> None:
        """See ``CheckpointTransport``."""
        self._exchange = exchange

    def metadata(self) -> str:
        """See ``HTTPTransport``."""
        return self.direct.metadata()

    def address(self) -> str:
        """See ``HTTPTransport``."""
        return self.direct.address()

    def copy_early(self, step: int, state_dict: T) -> None:
        """See ``CheckpointTransport``."""
        self.direct.copy_early(step, state_dict)

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """See ``HTTPTransport``. A background thread uploads the share of this source to the relays."""
        self._uploads = [one for one in self._uploads if one.is_running]
        for one in self._uploads:
            one.abort()  # no joiner waits for an older step
        self.direct.send_checkpoint(dst_ranks, step, state_dict, timeout)
        relays, exchange, snapshot = self._known_relays(), self._exchange, self.direct.staged
        if not relays or exchange is None or exchange.step != step or snapshot is None or not snapshot.hold():
            return
        self._uploads.append(Upload(snapshot, exchange, relays, timeout.total_seconds(), self.direct.rate_limiter))
        self._uploads[-1].start()

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str, *, lasting: bool = False) -> None:
        """See ``CheckpointTransport``."""
        self.direct.refuse_checkpoint(dst_ranks, step, reason, lasting=lasting)

    def allow_checkpoint(self, step: int) -> None:
        """See ``HTTPTransport``."""
        self.direct.allow_checkpoint(step)

    def disallow_checkpoint(self) -> None:
        """See ``CheckpointTransport``."""
        self.direct.disallow_checkpoint()

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
        """See ``HTTPTransport``."""
        del src_rank
        chunks = self._chunk_source(step)
        return self.direct.receive(metadata, step, timeout, chunks, into=into, progress=progress, limit=limit)

    def _chunk_source(self, step: int) -> Callable[[Transfer], ChunkSource]:
        relays, exchange = self._known_relays(), self._exchange
        self._brought = frozenset()
        is_joiner = exchange is not None and exchange.step == step and exchange.replica_id in exchange.joiners
        if exchange is None or not is_joiner or not (relays or len(exchange.beside) > 1):
            return partial(DirectChunks, streams=self._num_chunks)

        def relayed(transfer: Transfer) -> ChunkSource:
            server, address = self.direct.server, self.metadata()
            chunks = RelayedChunks(transfer, exchange, relays, server, address, self.direct.token)
            self._brought, self._by_relay = chunks.brought, bool(relays)
            return chunks

        return relayed

    def keep_present(self) -> None:
        """See ``CheckpointTransport``."""
        self.direct.keep_present()

    def source_lost(self, reason: str) -> None:
        """See ``CheckpointTransport``."""
        self.direct.source_lost(reason)

    def abort_receive(self, reason: str) -> None:
        """See ``CheckpointTransport``."""
        self.direct.abort_receive(reason)

    def _known_relays(self) -> list[Endpoint]:
        found = []
        for address in self._relays():
            try:
                found.append(self._credentials.endpoint(address))
            except ValueError as error:
                log.warning("relay ignored", reason=str(error))
        return found

    def shutdown(self, wait: bool = True) -> None:
        """See ``HTTPTransport``."""
        self.direct.shutdown(wait=False)
        for one in self._uploads:
            one.abort()
        for one in self._uploads if wait else ():
            one.join()
        self.direct.shutdown(wait)
