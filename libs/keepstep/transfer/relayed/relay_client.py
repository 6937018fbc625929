"""Requests of a trainer to relays about one checkpoint. docs/relay.md describes the protocol."""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from keepstep.connection.http_connection import Connection, Endpoint
from keepstep.state.errors import TransferError
from keepstep.transfer.exchange import Exchange
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


def checkpoints_path(job: str) -> str:
    """Return the path of the checkpoints of ``job`` at a relay."""
    return f"/v1/jobs/{quote(job, safe='')}/checkpoints"


class RelayCheckpoint:
    """One checkpoint at the relays, for the rank that uploads a part of it.

    Args:
        job: of the checkpoint.
        name: of the checkpoint.
        rank: whose manifest and pack this process uploads.
        producer: the group that the state is from.
    """

    def __init__(self, job: str, name: str, rank: int, producer: str) -> None:
        self.id = name
        self._rank = rank
        self._producer = producer
        self._all = checkpoints_path(job)
        self._path = f"{self._all}/{name}"

    def show(self, connection: Connection) -> dict[str, Any]:
        """Return the relay's view of the checkpoint."""
        return _view(connection.ask_json("GET", self._path).get("checkpoint"))

    def begin(self, connection: Connection, facts: Mapping[str, Any], *, again: bool = True) -> None:
        """Begin the checkpoint, unless another process has.

        Args:
            connection: to the relay.
            facts: fields of the request.
            again: begin it also if it was deleted. False: ``Refusal`` 410, with the reason of the deletion.
        """
        connection.ask_json("POST", self._all if again else f"{self._all}?again=0", {"id": self.id, **facts})

    def plan(self, connection: Connection, root: bytes) -> Plan:
        """Report the root digest of this rank's state."""
        body = {"rank": self._rank, "producer": self._producer, "root": root.hex()}
        return _plan(connection.ask_json("POST", f"{self._path}/plan", body))

    def put_manifest(self, connection: Connection, manifest: bytes) -> Plan:
        """Upload the manifest of this rank."""
        return _plan(connection.ask_json("PUT", f"{self._path}/manifest?rank={self._rank}", raw=manifest))

    def report(self, connection: Connection, *, part: bool = False) -> dict[str, Any]:
        """Report that the upload of this rank is complete. Returns when the relay has stored the state, if complete.

        Args:
            part: other relays have a part of the chunks.

        Returns:
            The relay's view of the checkpoint.
        """
        return _view(connection.ask_json("POST", f"{self._path}/result", {"rank": self._rank, "part": part}))

    def abort(self, connection: Connection, reason: str) -> None:
        """End the checkpoint for all ranks."""
        _, length = connection.ask(
            "POST", f"{self._path}/abort", "Content-Type: application/json\r\n", body=_json({"reason": reason})
        )
        connection.read(length)


class LiveCheckpoint(RelayCheckpoint):
    """The state of one step at the relays. All groups of the quorum derive the same ``id``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        world = hashlib.blake2b(
            repr((exchange.epoch, exchange.sources, exchange.joiners)).encode(), digest_size=6
        ).hexdigest()
        name = f"live-{exchange.quorum_id}-{exchange.step}-{world}"
        super().__init__(exchange.job, name, exchange.rank, exchange.replica_id)

    def announce(self, connection: Connection, root: bytes) -> Plan:
        """Announce the upload of the state with the digest ``root``."""
        exchange = self._exchange
        facts = {"step": exchange.step, "kind": "live", "ranks": exchange.world_size}
        self.begin(connection, facts | {"quorum_id": exchange.quorum_id})
        return self.plan(connection, root)

    def exchange_holders(
        self, connection: Connection, address: str, has: int, chunks: int
    ) -> dict[str, tuple[str, int]]:
        """Report the chunks ``has`` (bits) that this process serves at ``address``.

        Returns:
            Address and chunks of every other holder, by name.
        """
        bitmap = has.to_bytes(-(-chunks // 8), "little").hex()
        body = {"rank": self._rank, "address": address, "has": bitmap}
        name = holder_name(self._producer)
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


def _json(plain: object) -> bytes:
    return json.dumps(plain).encode()


def _view(answer: Any) -> dict[str, Any]:
    if type(answer) is not dict or not {"state", "committed", "lacking"} <= answer.keys():
        raise TransferError("invalid view of a checkpoint from the relay")
    return answer


def _plan(answer: dict[str, Any]) -> Plan:
    try:
        missing = int.from_bytes(bytes.fromhex(answer["lacks"]), "little")
        return Plan(bool(answer["agrees"]), bool(answer["has_manifest"]), missing)
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"invalid plan from the relay: {error!r}") from error
