"""Messages with file descriptors between two processes, over a Unix socket.

A frame is four bytes of length, then msgpack. No frame is unpickled, and none is longer than ``MAX_FRAME_BYTES``.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgpack

from keepstep_mesh.errors import KeepstepError

MAX_FRAME_BYTES = 4 << 20
"""Limit of a frame; about 50,000 tensors of one operation."""
MAX_DESCRIPTORS = 16
"""Limit of the descriptors that one frame carries."""
READ_BYTES = 1 << 16
SEND_SECONDS = 5.0
"""Limit of a send; the other end has stopped reading by then."""

_LENGTH = struct.Struct(">I")


class ChannelError(KeepstepError):
    """The other process broke the protocol, or does not read."""


class Channel:
    """One end of a pair of connected Unix stream sockets.

    Any thread may send; one thread receives.

    Args:
        sock: the socket, which the channel closes.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._bytes = bytearray()
        self._descriptors: list[int] = []

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message. The receiver gets duplicates of the descriptors.

        Raises:
            ChannelError: the message is too large, or the other end does not read.
            OSError: the other end is closed.
        """
        body = msgpack.packb([message, len(descriptors)])
        if len(body) > MAX_FRAME_BYTES:
            raise ChannelError(f"message too large: {len(body)} bytes (limit {MAX_FRAME_BYTES})")
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        deadline = time.monotonic() + SEND_SECONDS
        with self._sending:
            while frame:
                try:
                    sent = self._socket.sendmsg([frame], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    if not _ready(self._socket, select.POLLOUT, deadline):
                        raise ChannelError(f"the other process did not read for {SEND_SECONDS} s") from None
                    continue
                frame, ancillary = frame[sent:], []

    def receive(self, deadline: float | None = None) -> tuple[Any, list[int]] | None:
        """Receive a message and its descriptors.

        Args:
            deadline: on ``time.monotonic``; None: wait without a limit, for an owner that closes the other end.

        Returns:
            None if the other end is closed.

        Raises:
            TimeoutError: no message arrived by the deadline.
            ChannelError: the bytes are not a message.
        """
        while (length := self._frame_length()) is None or len(self._bytes) < _LENGTH.size + length:
            if not _ready(self._socket, select.POLLIN, deadline):
                raise TimeoutError
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, MAX_DESCRIPTORS)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._bytes += data
            self._descriptors += descriptors
        body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
        del self._bytes[: _LENGTH.size + length]
        try:
            message, count = msgpack.unpackb(body, strict_map_key=False)
            if not 0 <= count <= len(self._descriptors):
                raise ValueError(f"{count} descriptors announced, {len(self._descriptors)} received")
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise ChannelError(f"invalid message from the other process: {error}") from error
        descriptors, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return message, descriptors

    def _frame_length(self) -> int | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MAX_FRAME_BYTES:
            raise ChannelError(f"frame too large: {length} bytes (limit {MAX_FRAME_BYTES})")
        return int(length)

    def interrupt(self) -> None:
        """Make a ``receive`` in another thread return None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and the descriptors that no message has claimed."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _ready(sock: socket.socket, event: int, deadline: float | None) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)))
