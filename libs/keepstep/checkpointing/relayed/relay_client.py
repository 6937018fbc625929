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
    """The current token for relays, and the current TLS settings, for each new connection."""

    def __init__(self, token: ClientToken, tls: TlsFiles) -> None:
        self._token = token
        self._context = watched_client_context(tls)
        self._default: ssl.SSLContext | None = None

    def endpoint(self, address: str) -> Endpoint:
        """Return the endpoint of the relay at ``address``. Raises ``ValueError`` for an invalid address."""
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
    """The answer of a relay about the state of one rank."""

    agrees: bool
    """Whether the relay has, or waits for, a state with the same root digest."""
    has_manifest: bool
    missing: int
    """The chunks that the relay does not have, as bits."""


class LiveCheckpoint:
    """The state of one step at the relays. All groups of the quorum derive the same ``id``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        world = hashlib.blake2b(
            repr((exchange.epoch, exchange.sources, exchange.joiners)).encode(), digest_size=6
        ).hexdigest()
        self.id = f"live-{exchange.quorum_id}-{exchange.step}-{world}"
        self._all = f"/v1/jobs/{quote(exchange.job, safe='')}/checkpoints"
        self._path = f"{self._all}/{self.id}"

    def begin(self, connection: Connection, root: bytes) -> Plan:
        """Announce the upload of the state with the digest ``root``."""
        exchange = self._exchange
        facts = {"id": self.id, "step": exchange.step, "kind": "live", "ranks": exchange.world_size}
        connection.ask_json("POST", self._all, facts | {"quorum_id": exchange.quorum_id})
        body = {"rank": exchange.rank, "producer": exchange.replica_id, "root": root.hex()}
        return _plan(connection.ask_json("POST", f"{self._path}/plan", body))

    def put_manifest(self, connection: Connection, manifest: bytes) -> Plan:
        """Upload the manifest of this rank."""
        target = f"{self._path}/manifest?rank={self._exchange.rank}"
        return _plan(connection.ask_json("PUT", target, raw=manifest))

    def finish(self, connection: Connection, *, part: bool) -> None:
        """Report that the upload of this rank is complete. Returns when the relay has stored the state, if complete.

        Args:
            part: other relays have a part of the chunks.
        """
        connection.ask_json("POST", f"{self._path}/result", {"rank": self._exchange.rank, "part": part})

    def exchange_holders(
        self, connection: Connection, address: str, has: int, chunks: int
    ) -> dict[str, tuple[str, int]]:
        """Report the chunks ``has`` (bits) that this process serves at ``address``.

        Returns:
            Address and chunks of every other holder, by name.
        """
        bitmap = has.to_bytes(-(-chunks // 8), "little").hex()
        body = {"rank": self._exchange.rank, "address": address, "has": bitmap}
        name = holder_name(self._exchange.replica_id)
        answer = connection.ask_json("PUT", f"{self._path}/holders/{name}", body)
        try:
            return {
                str(one["name"]): (str(one["address"]), int.from_bytes(bytes.fromhex(one["has"]), "little"))
                for one in answer["holders"]
                if one["name"] != name
            }
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"invalid list of holders from the relay: {error!r}") from error


def put_chunk(connection: Connection, digest: bytes, data: memoryview) -> None:
    """Upload a chunk."""
    _, length = connection.ask("PUT", f"/v1/chunks/{digest.hex()}", body=data)
    if length:
        raise TransferError(f"the answer to an uploaded chunk has {length} bytes, expected 0")


def home(digest: bytes, relays: list[str]) -> str:
    """Return the relay of a chunk, by rendezvous hashing.

    Each relay has an equal share of the chunks. When a relay fails, only its own chunks move.
    """
    return max(relays, key=lambda relay: hashlib.blake2b(digest + relay.encode(), digest_size=8).digest())


def holder_name(replica_id: str) -> str:
    """Return a name for ``replica_id`` that is valid at a relay."""
    return hashlib.blake2b(replica_id.encode(), digest_size=12).hexdigest()


def _plan(answer: dict[str, Any]) -> Plan:
    try:
        missing = int.from_bytes(bytes.fromhex(answer["lacks"]), "little")
        return Plan(bool(answer["agrees"]), bool(answer["has_manifest"]), missing)
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"invalid plan from the relay: {error!r}") from error
