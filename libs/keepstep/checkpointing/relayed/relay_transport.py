"""Healing through the relays: uploaded once, by all healthy groups together, fetched by any number of joiners.

Every source serves its snapshot itself too. Where no relay is known, several joiners of one source take each chunk from
it once, and pass it on; a single one is served as by ``HTTPTransport``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

from keepstep.checkpointing.direct.connection import Endpoint
from keepstep.checkpointing.direct.http_client import Fetch
from keepstep.checkpointing.direct.peer_choice import SOURCE
from keepstep.checkpointing.http_transport import HTTPTransport
from keepstep.checkpointing.relayed.relay_client import Credentials
from keepstep.checkpointing.relayed.relay_fetch import RelayFetch
from keepstep.checkpointing.relayed.relay_upload import Upload
from keepstep.checkpointing.transport import Exchange, Progress
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import ClientToken

T = TypeVar("T")

log = get_logger("keepstep.checkpointing")


class RelayTransport(HTTPTransport[T]):
    """The Manager's transport unless it is given another.

    Args:
        timeout: see ``HTTPTransport``; an upload takes no longer either.
        relays: addresses of the relays, asked before each transfer; empty: transfers are direct.
        num_chunks: parallel streams of a direct transfer.
        hostname, token: see ``HTTPTransport``. A relay is shown what is derived from the token for its address.
        tls: for relays at https addresses.
        uplink: see ``HTTPTransport``; uploads are a part of it.
    """

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
        super().__init__(timeout, num_chunks, hostname, token, uplink)
        self._relays = relays
        self._exchange: Exchange | None = None
        self._brought: set[str] = set()
        self._by_relay = False
        self._uploads: list[Upload] = []
        """The newest, and older ones that are about to end."""

    @property
    def via(self) -> str:
        if not self._brought - {SOURCE}:
            return "direct"
        return "relay" if self._by_relay else "peers"

    @property
    def needs_all_sources(self) -> bool:
        return bool(self._known_relays())

    def prepare(self, exchange: Exchange) -> None:
        """See ``CheckpointTransport``."""
        self._exchange = exchange

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """See ``HTTPTransport``; this source's share is uploaded in the background."""
        self._uploads = [one for one in self._uploads if one.is_running]
        for one in self._uploads:
            one.abort()  # of an older step: nobody waits for it
        super().send_checkpoint(dst_ranks, step, state_dict, timeout)
        relays, exchange, snapshot = self._known_relays(), self._exchange, self._staged
        if not relays or exchange is None or exchange.step != step or snapshot is None or not snapshot.hold():
            return
        self._uploads.append(Upload(snapshot, exchange, relays, timeout.total_seconds(), self._budget))
        self._uploads[-1].start()

    def _fetch(self, metadata: str, step: int, timeout: float, progress: Progress | None, limit: float | None) -> Fetch:
        relays, exchange = self._known_relays(), self._exchange
        self._brought = set()
        if exchange is None or exchange.step != step or exchange.replica_id not in exchange.joiners:
            return super()._fetch(metadata, step, timeout, progress, limit)
        if not relays and len(exchange.beside) < 2:
            return super()._fetch(metadata, step, timeout, progress, limit)
        fetch = RelayFetch(
            *(metadata, exchange, relays, self._server, self.metadata(), timeout),
            token=self._token,
            progress=progress,
            limit=limit,
            spare=self._spare,
        )
        self._brought = fetch.brought
        self._by_relay = bool(relays)
        return fetch

    def _known_relays(self) -> list[Endpoint]:
        found = []
        for address in self._relays():
            try:
                found.append(self._credentials.endpoint(address))
            except ValueError as error:
                log.warning("relay left out", reason=str(error))
        return found

    def shutdown(self, wait: bool = True) -> None:
        """See ``HTTPTransport``."""
        super().shutdown(wait=False)
        for one in self._uploads:
            one.abort()
        for one in self._uploads if wait else ():
            one.join()
        super().shutdown(wait)
