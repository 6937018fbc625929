"""The place of a checkpoint: at a relay, or in a directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from keepstep.relay_client.relay_paths import CHECKPOINT_URL, AtRelay
from keepstep.state.errors import CheckpointError

EXPECTED = f"expected {CHECKPOINT_URL}, a directory, or file:///DIRECTORY"


@dataclass(frozen=True)
class InDirectory:
    path: Path

    def __str__(self) -> str:
        return str(self.path)


Location = AtRelay | InDirectory


def parse(checkpoint_id: str | os.PathLike[str]) -> Location:
    """Return the location that ``checkpoint_id`` names. Raises ``CheckpointError`` if it is invalid."""
    text = os.fspath(checkpoint_id)
    if not text or "\0" in text:
        raise CheckpointError(f"invalid checkpoint_id {text!r}: {EXPECTED}")
    if "://" not in text:
        return InDirectory(Path(text).absolute())
    try:
        url = urlsplit(text)
        at_relay = AtRelay.parse(text)
    except ValueError as error:
        raise CheckpointError(f"invalid checkpoint_id {text!r}: {error}; {EXPECTED}") from error
    if at_relay is not None:
        return at_relay
    if url.scheme == "file" and url.netloc in ("", "localhost") and url.path:
        return InDirectory(Path(unquote(url.path)))
    raise CheckpointError(f"invalid checkpoint_id {text!r}: Cannot detect the storage of {url.scheme}://; {EXPECTED}")
