"""Decode equal frames of many groups once.

In a step most groups send the same request: the same step, lineage and report, and the same number if they started
together. Frames with facts about one group are longer, and not remembered.
"""

from __future__ import annotations

from keepstep_mesh.protocol import codec

MAX_BYTES = 128
MAX_REMEMBERED = 256
"""Limit of the remembered frames; then all are forgotten."""


class RepeatedFrames:
    """The short frames that were decoded lately, of all sessions."""

    def __init__(self) -> None:
        self._messages: dict[bytes, codec.Message] = {}

    def decode(self, frame: bytes) -> codec.Message:
        """Return the message of a frame, which may be that of an equal one. Raises ``ProtocolError`` as ``codec``."""
        message = self._messages.get(frame)
        if message is None:
            message = codec.decode(frame)
            if len(frame) <= MAX_BYTES:
                if len(self._messages) >= MAX_REMEMBERED:
                    self._messages.clear()
                self._messages[frame] = message
        return message
