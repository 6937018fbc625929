"""Requests to a relay about one checkpoint. Each method sends one request, which may be repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.connection.http_connection import Connection
from keepstep.relay_client import relay_paths
from keepstep.relay_client.relay_link import DamagedBytes
from keepstep.state.errors import TransferError
from keepstep_mesh.protocol.manifest import MAX_MANIFEST_BYTES, chunk_digest

VIEW = {"state", "committed", "lacking", "ranks", "version"}
"""Fields of the view of a checkpoint that this client uses."""

View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of a relay about the state of one rank."""

    agrees: bool
    """Whether the relay has, or waits for, a state with the same root digest."""
    has_manifest: bool
    missing: int
    """The chunks that the relay does not have, as bits."""


class RelayCheckpoint:
    """One checkpoint at a relay, for one rank of it.

    Every method raises ``BrokenConnection`` if the connection breaks, ``Refusal`` if the relay refuses the request, and
    ``TransferError`` if the answer does not come from a relay.

    Args:
        job: of the checkpoint.
        name: of the checkpoint.
        rank: whose manifest and pack this process uploads.
        producer: the group or process that the state is from. Empty: this process only reads.
    """

    def __init__(self, job: str, name: str, rank: int = 0, producer: str = "") -> None:
        self.job = job
        self.id = name
        self.rank = rank
        self.producer = producer
        self._version = ""

    def pin(self, view: View) -> None:
        """Ask for the version that ``view`` shows from now on, also after a later save has overwritten it."""
        self._version = f"~{int(view['version'])}"

    def _target(self, *below: str, **query: object) -> str:
        return relay_paths.target(relay_paths.checkpoint(self.job, self.id + self._version, *below), **query)

    # ---- the whole checkpoint

    def show(self, connection: Connection) -> View:
        """Return the relay's view of the checkpoint."""
        return _view(connection.ask_json("GET", self._target()).get("checkpoint"))

    def begin(self, connection: Connection, facts: Mapping[str, Any], *, again: bool = True) -> View:
        """Begin the checkpoint, unless another process has, and return the relay's view of it.

        Args:
            connection: to the relay.
            facts: fields of the request.
            again: begin it also if it was deleted. False: ``Refusal`` 410, with the reason of the deletion.
        """
        query = {"rank": self.rank} if again else {"rank": self.rank, "again": 0}
        target = relay_paths.target(relay_paths.checkpoints(self.job), **query)
        return _view(connection.ask_json("POST", target, {"id": self.id, **facts}))

    def commit(self, connection: Connection) -> View:
        """Commit the checkpoint, which must be complete."""
        return _view(connection.ask_json("POST", self._target("commit")))

    def abort(self, connection: Connection, reason: str) -> None:
        """End the upload for all ranks."""
        _send(connection, "POST", self._target("abort"), {"reason": reason})

    def remove(self, connection: Connection) -> None:
        """Delete the checkpoint. Needs an admin token."""
        _send(connection, "DELETE", self._target(), None)

    # ---- the part of this rank

    def plan(self, connection: Connection, root: bytes) -> Plan:
        """Report the root digest of this rank's state."""
        body = {"rank": self.rank, "producer": self.producer, "root": root.hex()}
        return _plan(connection.ask_json("POST", self._target("plan"), body))

    def put_manifest(self, connection: Connection, manifest: bytes) -> Plan:
        """Upload the manifest of this rank."""
        return _plan(connection.ask_json("PUT", self._target("manifest", rank=self.rank), raw=manifest))

    def report(self, connection: Connection, *, part: bool = False) -> View:
        """Report that the upload of this rank is complete. Returns when the relay has stored the state, if complete.

        Args:
            connection: to the relay.
            part: other relays have a part of the chunks.

        Returns:
            The relay's view of the checkpoint.
        """
        return _view(connection.ask_json("POST", self._target("result"), {"rank": self.rank, "part": part}))

    def fail(self, connection: Connection, error: str) -> None:
        """Report that this rank failed, which ends the upload for all ranks. Raises ``Refusal`` 410 when it did."""
        connection.ask_json("POST", self._target("result"), {"rank": self.rank, "error": error})

    # ---- the meeting of the ranks

    def put_layout(self, connection: Connection, layout: bytes) -> None:
        """Report what this rank holds."""
        connection.ask_json("PUT", self._target("layout", rank=self.rank), raw=layout)

    def layouts(self, connection: Connection, wait: float) -> list[str | None]:
        """Return the digest of each rank's layout in hex, after a wait of up to ``wait`` seconds for missing ones."""
        answer = connection.ask_json("GET", self._target("layouts", rank=self.rank, wait=f"{wait:.3f}"))
        return list(answer["digests"])

    def layout(self, connection: Connection, digest: bytes) -> bytes:
        """Return the layout with a digest."""
        layout = _read(connection, self._target("layouts", digest.hex()), "layout")
        if chunk_digest(layout) != digest:
            raise TransferError(f"the relay sent a layout that does not match its digest {digest.hex()}")
        return layout

    def state(self, connection: Connection, wait: float = 0.0) -> View:
        """Return the state of the upload; with ``wait`` (seconds), after the end of the upload. A sign of life."""
        return connection.ask_json("GET", self._target("state", rank=self.rank, wait=f"{wait:.3f}"))

    # ---- reads

    def manifest(self, connection: Connection, rank: int) -> bytes:
        """Return the manifest of a rank."""
        return _read(connection, self._target("manifest", rank=rank), "manifest")

    def ask_range(self, connection: Connection, rank: int, offset: int, length: int) -> None:
        """Ask for a range of the pack of a rank. The caller receives the bytes from ``connection``."""
        line = f"Range: bytes={offset}-{offset + length - 1}\r\n"
        _check_length(connection, connection.ask("GET", self._target("packs", str(rank)), line)[1], length)

    # ---- processes that serve chunks

    def exchange_holders(
        self, connection: Connection, name: str, address: str, has: int, chunks: int
    ) -> dict[str, tuple[str, int]]:
        """Report the chunks ``has`` (bits) that this process serves at ``address``, under ``name``.

        Returns:
            Address and chunks of every other holder, by name.
        """
        bitmap = has.to_bytes(-(-chunks // 8), "little").hex()
        body = {"rank": self.rank, "address": address, "has": bitmap}
        answer = connection.ask_json("PUT", self._target("holders", name), body)
        try:
            return {
                str(one["name"]): (str(one["address"]), int.from_bytes(bytes.fromhex(one["has"]), "little"))
                for one in answer["holders"]
                if one["name"] != name
            }
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"invalid list of holders from the relay: {error!r}") from error


def list_checkpoints(connection: Connection, job: str) -> View:
    """Return all checkpoints of a job."""
    return connection.ask_json("GET", relay_paths.target(relay_paths.checkpoints(job)))


def put_chunk(connection: Connection, digest: bytes, data: memoryview) -> None:
    """Upload a chunk."""
    _, length = connection.ask("PUT", relay_paths.target(relay_paths.chunk(digest)), body=data)
    if length:
        raise TransferError(f"the answer to an uploaded chunk has {length} bytes, expected 0")


def ask_chunk(connection: Connection, digest: bytes, length: int) -> None:
    """Ask for a chunk. The caller receives its bytes from ``connection``."""
    _check_length(connection, connection.ask("GET", relay_paths.target(relay_paths.chunk(digest)))[1], length)


def _check_length(connection: Connection, found: int, length: int) -> None:
    if found != length:
        raise DamagedBytes(f"wrong length of an answer of {connection.address}: {found} bytes, expected {length}")


def _read(connection: Connection, target: str, what: str) -> bytes:
    _, length = connection.ask("GET", target)
    if length > MAX_MANIFEST_BYTES:
        raise TransferError(f"{what} too large: {length} bytes (limit {MAX_MANIFEST_BYTES})")
    return bytes(connection.read(length))


def _send(connection: Connection, method: str, target: str, plain: object) -> None:
    """Send a request whose answer has no content."""
    body = json.dumps(plain).encode()
    _, length = connection.ask(method, target, "Content-Type: application/json\r\n", body=body)
    connection.read(length)


def _view(answer: Any) -> View:
    if type(answer) is not dict or not answer.keys() >= VIEW:
        raise TransferError("invalid view of a checkpoint from the relay")
    return answer


def _plan(answer: dict[str, Any]) -> Plan:
    try:
        missing = int.from_bytes(bytes.fromhex(answer["lacks"]), "little")
        return Plan(bool(answer["agrees"]), bool(answer["has_manifest"]), missing)
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"invalid plan from the relay: {error!r}") from error
