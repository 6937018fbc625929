"""Requests of a trainer to relays about one checkpoint. docs/relay.md describes the protocol."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from keepstep.checkpointing.direct.connection import Connection, Endpoint
from keepstep.checkpointing.errors import TransferError
from keepstep.checkpointing.transport import Exchange
from keepstep_mesh.security.tls import TlsFiles, watched_client_context
from keepstep_mesh.security.tokens import ClientToken, derived, place_of


class Credentials:
    """What is shown to a relay, and whom to trust, as it is at the moment of each connection."""

    def __init__(self, token: ClientToken, tls: TlsFiles) -> None:
        self._token = token
        self._context = watched_client_context(tls)
        self._default: ssl.SSLContext | None = None

    def endpoint(self, address: str) -> Endpoint:
        """Raises ``ValueError`` for what is no address."""
        return Endpoint.of(address, partial(self._headers, place_of("relay", address)), self._tls)

    def _headers(self, place: str) -> Mapping[str, str]:
        token = self._token.latest()
        return {"Authorization": f"Bearer {derived(token, place)}"} if token else {}

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._default = self._default or TlsFiles().client_context()
            return self._default
        self._context.refresh()
        return self._context.value


@dataclass(frozen=True, slots=True)
class Plan:
    """What a relay says of one rank's state."""

    agrees: bool
    """Whether it has, or waits for, the very state that was named."""
    has_manifest: bool
    lacks: int
    """Its chunks that are not there, as bits."""


class LiveCheckpoint:
    """The state of one step, as it is known to relays: the same name, whoever of the quorum says it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        world = hashlib.blake2b(
            repr((exchange.epoch, exchange.sources, exchange.joiners)).encode(), digest_size=6
        ).hexdigest()
        self.id = f"live-{exchange.quorum_id}-{exchange.step}-{world}"
        self._all = f"/v1/jobs/{quote(exchange.job, safe='')}/checkpoints"
        self._path = f"{self._all}/{self.id}"

    def begin(self, connection: Connection, root: bytes) -> Plan:
        """Says that it comes, and of what state it is."""
        exchange = self._exchange
        facts = {"id": self.id, "step": exchange.step, "kind": "live", "ranks": exchange.world_size}
        connection.ask_json("POST", self._all, facts | {"quorum_id": exchange.quorum_id})
        said = {"rank": exchange.rank, "producer": exchange.replica_id, "root": root.hex()}
        return _plan(connection.ask_json("POST", f"{self._path}/plan", said))

    def put_manifest(self, connection: Connection, manifest: bytes) -> Plan:
        target = f"{self._path}/manifest?rank={self._exchange.rank}"
        return _plan(connection.ask_json("PUT", target, raw=manifest))

    def finish(self, connection: Connection, *, part: bool) -> None:
        """All of this rank is there; ``part``: or at other relays. Returns when the relay has made it last, if it has
        all, and this was the last rank.
        """
        connection.ask_json("POST", f"{self._path}/result", {"rank": self._exchange.rank, "part": part})

    def hold(self, connection: Connection, address: str, has: int, chunks: int) -> dict[str, tuple[str, int]]:
        """Says which chunks are served at ``address``. Who else serves some: address and chunks, by name."""
        bitmap = has.to_bytes(-(-chunks // 8), "little").hex()
        said = {"rank": self._exchange.rank, "address": address, "has": bitmap}
        name = holder_name(self._exchange.replica_id)
        answer = connection.ask_json("PUT", f"{self._path}/holders/{name}", said)
        try:
            return {
                str(one["name"]): (str(one["address"]), int.from_bytes(bytes.fromhex(one["has"]), "little"))
                for one in answer["holders"]
                if one["name"] != name
            }
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"the relay's list of holders makes no sense: {error!r}") from error


def put_chunk(connection: Connection, digest: bytes, data: memoryview) -> None:
    _, length = connection.ask("PUT", f"/v1/chunks/{digest.hex()}", body=data)
    if length:
        raise TransferError(f"a chunk was answered with {length} bytes where none were expected")


def home(digest: bytes, relays: list[str]) -> str:
    """The relay that has a chunk: the same for all who know the same relays; each has an equal share of the chunks,
    and only the chunks of one that is gone move (rendezvous hashing).
    """
    return max(relays, key=lambda relay: hashlib.blake2b(digest + relay.encode(), digest_size=8).digest())


def holder_name(replica_id: str) -> str:
    """A name that the relay takes."""
    return hashlib.blake2b(replica_id.encode(), digest_size=12).hexdigest()


def _plan(answer: dict[str, Any]) -> Plan:
    try:
        lacks = int.from_bytes(bytes.fromhex(answer["lacks"]), "little")
        return Plan(bool(answer["agrees"]), bool(answer["has_manifest"]), lacks)
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"the relay's plan makes no sense: {error!r}") from error
