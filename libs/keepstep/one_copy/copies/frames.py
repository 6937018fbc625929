"""Frames on a socket between two ranks: a header in msgpack, and the bytes of a state with their digest.

A frame is a length of 4 bytes, the header, and ``header["bytes"]`` bytes. States travel as a manifest, which has the
digests, and a pack (``keepstep.state``), so that no code of the sender runs, and damaged bytes are refused.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from keepstep.state.state_bytes import load_state, save_state
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.fork_safety import open_socket
from keepstep_mesh.protocol.manifest import MAX_MANIFEST_BYTES, MAX_PACK_BYTES
from keepstep_mesh.security.tokens import ClientToken

MAX_HEADER_BYTES = MAX_MANIFEST_BYTES + (1 << 20)
MAX_HELLO_BYTES = 1 << 16
"""Limit of the first header, which comes before the token is checked."""
_LENGTH = struct.Struct("!I")
NOTHING = memoryview(b"")
POLL_SECONDS = 0.2
"""A wait looks this often whether it was ended from outside."""


Stored = tuple[bytes, memoryview]
"""Manifest and pack of a state."""


class CopyError(KeepstepError):
    """A copy could not be sent, kept or read."""


class Frames:
    """One connection.

    Args:
        connection: connected; owned by this object.
        ended: returns why waits end early; empty: they go on.
    """

    def __init__(self, connection: socket.socket, ended: Callable[[], str] = lambda: "") -> None:
        self._socket = connection
        self._socket.settimeout(POLL_SECONDS)
        self._ended = ended

    def send(self, header: dict[str, Any], body: memoryview = NOTHING, *, limit: float) -> None:
        """Send a frame.

        Args:
            header: of values of msgpack.
            body: any bytes.
            limit: longest time without progress, seconds.

        Raises:
            CopyError: the connection ended, or the limit passed.
        """
        packed = msgpack.packb({**header, "bytes": body.nbytes})
        for part in (memoryview(_LENGTH.pack(len(packed)) + packed), body):
            sent, last = 0, time.monotonic()
            while sent < part.nbytes:
                with self._waiting(last + limit):
                    sent += self._socket.send(part[sent:])
                    last = time.monotonic()

    def receive(self, limit: float, *, most: int = MAX_PACK_BYTES) -> tuple[dict[str, Any], memoryview]:
        """Return the header and the body of the next frame.

        Args:
            limit: longest time without progress, seconds.
            most: limit of the body, in bytes.

        Raises:
            CopyError: the connection ended, the limit passed, or the frame is invalid.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, limit))
        largest = MAX_HEADER_BYTES if most else MAX_HELLO_BYTES
        if length > largest:
            raise CopyError(f"header too large: {length} bytes (limit {largest})")
        try:
            header = msgpack.unpackb(self._read(length, limit), strict_map_key=False)
            size = header["bytes"]
        except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
            raise CopyError(f"a frame has no valid header: {error}") from error
        if type(size) is not int or not 0 <= size <= most:
            raise CopyError(f"a frame has {size} bytes; expected a number in [0, {most}]")
        return header, self._read(size, limit)

    def _read(self, size: int, limit: float) -> memoryview:
        try:
            data = memoryview(bytearray(size))
        except MemoryError as error:
            raise CopyError(f"no memory for {size} bytes") from error
        done, last = 0, time.monotonic()
        while done < size:
            with self._waiting(last + limit):
                count = self._socket.recv_into(data[done:])
                if not count:
                    raise CopyError("the peer has closed the connection")
                done, last = done + count, time.monotonic()
        return data

    @contextlib.contextmanager
    def _waiting(self, deadline: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            if reason := self._ended():
                raise CopyError(reason) from None
            if time.monotonic() >= deadline:
                raise CopyError("no progress of the peer in time") from None
        except OSError as error:
            raise CopyError(f"the connection has ended: {error}") from error

    def close(self) -> None:
        """End the connection. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: str, token: ClientToken, limit: float, ended: Callable[[], str] = lambda: "") -> Frames:
    """Connect to the ``CopyServer`` at ``host:port``.

    Raises:
        CopyError: it does not answer within ``limit`` seconds.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        connection = open_socket(family, kind, protocol)
        connection.settimeout(limit)
        try:
            connection.connect(where)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            connection.close()
            raise
    except (OSError, ValueError) as error:
        raise CopyError(f"{address} does not answer: {error}") from error
    frames = Frames(connection, ended)
    frames.send({"kind": "hello", "authorization": token.peer_headers().get("Authorization", "")}, limit=limit)
    return frames


def packed_state(state: Any) -> Stored:
    """Return the manifest and the bytes of a state, for the header and the body of a frame."""
    return save_state(state)


def state_of(manifest: bytes, pack: memoryview) -> Any:
    """Return the state of a frame, after a check of its digests.

    Raises:
        ManifestError, TransferError: the bytes are damaged.
    """
    return load_state(manifest, pack)
