"""Settings of a session with the lighthouse."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from keepstep.session.session_machine import About
from keepstep_mesh.config.settings import from_environment
from keepstep_mesh.security.tls import TlsFiles, tls_of_client
from keepstep_mesh.security.tokens import ClientToken


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Settings of a session with the lighthouse. Times are in seconds.

    ``addresses``: ``http://host:port``, ``https://...`` or ``host:port`` of every lighthouse. ``tls``: for https;
    without files the CAs of the system are trusted. Changed files are reloaded before each connection.
    """

    addresses: tuple[str, ...]
    job: str
    replica_id: str
    token: str | ClientToken | None = None
    connect_timeout: float = 60.0
    """Limit of ``start``."""
    heartbeat_interval: float = 0.1
    """A request; the lighthouse decides."""
    library: str = ""
    """Name and version of the client, which an error about protocol versions names."""
    about: About = field(default_factory=About)
    """Sent to the lighthouse for operators."""
    tls: TlsFiles = field(default_factory=TlsFiles)

    @classmethod
    def from_environment(
        cls,
        addresses: tuple[str, ...],
        replica_id: str,
        *,
        connect_timeout: float,
        heartbeat_interval: float = 0.1,
        runtime: str = "",
        spares: int = 0,
    ) -> SessionSettings:
        """Read job, number of groups, token, and certificates from the environment.

        ``runtime``: see ``Hello``. ``spares``: number of groups that stand by; the number of groups excludes them.
        """
        _, job = from_environment("JOB") or ("", "default")
        return cls(
            addresses=addresses,
            job=job,
            replica_id=replica_id,
            token=ClientToken(),
            connect_timeout=connect_timeout,
            heartbeat_interval=heartbeat_interval,
            library=_library(),
            tls=tls_of_client(),
            about=About(socket.gethostname(), runtime, max(0, _groups() - spares), standby=spares > 0),
        )


def _library() -> str:
    """Return name and version of this package; only the name where it runs without having been installed."""
    try:
        return f"keepstep {version('keepstep')}"
    except PackageNotFoundError:
        return "keepstep"


def _groups() -> int:
    """Return NUM_REPLICA_GROUPS; 0 if it is not a number of groups, because scripts may use it in their own way."""
    text = os.environ.get("NUM_REPLICA_GROUPS", "")
    return int(text) if text.isdecimal() and len(text) <= 5 else 0
