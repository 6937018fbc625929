"""Choose the chunks that one of several uploaders of an equal state sends. Pure.

Uploader k of n first sends the chunks k, k + n, ... When all of these are there and no other chunk arrives, it sends
the other chunks too: their uploader may be gone.
"""

from __future__ import annotations

UPLOAD_PATIENCE_SECONDS = 0.5
PATIENCE_CHUNKS = 4
"""An uploader sends the chunks of others when none of them arrived for ``UPLOAD_PATIENCE_SECONDS``, or for the time in
which it sends this many chunks, if that is longer."""


class UploadShare:
    """The share of one uploader.

    Args:
        place: number of this uploader, in [0, uploaders).
        uploaders: number of all.
        chunks: of the state.
    """

    def __init__(self, place: int, uploaders: int, chunks: int) -> None:
        self._share = sum(1 << chunk for chunk in range(place, chunks, uploaders))
        self._missing = -1
        self._changed = 0.0
        self._patience = UPLOAD_PATIENCE_SECONDS

    def choose(self, missing: int, now: float) -> int:
        """Return the chunks to send now, as bits; 0: wait for the other uploaders.

        Args:
            missing: the chunks that are not there, as bits.
            now: monotonic time in seconds.
        """
        if missing != self._missing:
            self._missing, self._changed = missing, now
        mine = missing & self._share
        if not mine and now - self._changed > self._patience:
            mine, self._changed = missing, now
        return mine

    def sent(self, chunks: int, seconds: float) -> None:
        """Note that ``chunks`` (bits) were sent in ``seconds``: if chunks take long, those of others do too."""
        self._patience = max(UPLOAD_PATIENCE_SECONDS, PATIENCE_CHUNKS * seconds / chunks.bit_count())
