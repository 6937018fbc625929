"""The place of a checkpoint: at a relay, or in a directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from keepstep.state.errors import CheckpointError
from keepstep_mesh.protocol import names

EXPECTED = "expected http://HOST:PORT/v1/jobs/JOB/checkpoints/ID, a directory, or file:///DIRECTORY"


@dataclass(frozen=True)
class AtRelay:
    address: str
    """``http://host:port``."""
    job: str
    id: str
    others: tuple[str, ...] = ()
    """Addresses of more relays that have the checkpoint."""

    def __str__(self) -> str:
        return f"{self.address}/v1/jobs/{self.job}/checkpoints/{self.id}"


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
        port = url.port
    except ValueError as error:
        raise CheckpointError(f"invalid checkpoint_id {text!r}: {error}; {EXPECTED}") from error
    if url.scheme == "file" and url.netloc in ("", "localhost") and url.path:
        return InDirectory(Path(unquote(url.path)))
    match url.path.split("/"):
        case ["", "v1", "jobs", job, "checkpoints", name] if url.scheme in ("http", "https") and port is not None:
            for part, what in ((job, "job"), (name, "checkpoint")):
                if problem := names.problem(part, what):
                    raise CheckpointError(f"invalid checkpoint_id {text!r}: {problem}")
            return AtRelay(f"{url.scheme}://{url.netloc}", job, name)
    raise CheckpointError(f"invalid checkpoint_id {text!r}: {EXPECTED}")
