"""URLs of a relay. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from keepstep_mesh.protocol import names

CHECKPOINTS_URL = "http://HOST:PORT/v1/jobs/JOB/checkpoints"
CHECKPOINT_URL = f"{CHECKPOINTS_URL}/ID"

Parts = tuple[str, ...]
"""The parts of a path below ``/v1``, not quoted."""


def checkpoints(job: str) -> Parts:
    """Return the path of all checkpoints of a job."""
    return ("jobs", job, "checkpoints")


def checkpoint(job: str, name: str, *below: str) -> Parts:
    """Return the path of one checkpoint, or of something ``below`` it."""
    return (*checkpoints(job), name, *below)


def chunk(digest: bytes) -> Parts:
    """Return the path of a chunk."""
    return ("chunks", digest.hex())


def target(parts: Parts, **query: object) -> str:
    """Return the target of a request for a path, such as ``/v1/chunks/0a?wait=2``."""
    path = "/".join(("/v1", *(quote(part, safe="") for part in parts)))
    return path + ("?" + "&".join(f"{name}={value}" for name, value in query.items()) if query else "")


@dataclass(frozen=True)
class AtRelay:
    """A checkpoint at a relay."""

    address: str
    """``http://host:port``."""
    job: str
    id: str
    others: tuple[str, ...] = ()
    """Addresses of more relays that have the checkpoint."""

    def __str__(self) -> str:
        return f"{self.address}{target(checkpoint(self.job, self.id))}"

    @classmethod
    def parse(cls, url: str) -> AtRelay | None:
        """Return the checkpoint that a URL names. None: it has another form. Raises ``ValueError`` for a bad name."""
        parsed = urlsplit(url)
        if parsed.scheme not in ("http", "https") or parsed.port is None:
            return None
        match parsed.path.split("/"):
            case ["", "v1", "jobs", job, "checkpoints", name]:
                for part, what in ((job, "job"), (name, "checkpoint")):
                    if problem := names.problem(part, what):
                        raise ValueError(problem)
                return cls(f"{parsed.scheme}://{parsed.netloc}", job, name)
        return None
