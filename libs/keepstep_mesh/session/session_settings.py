"""What a worker needs to know to open its session with the lighthouse."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep_mesh.config.settings import from_environment
from keepstep_mesh.security.tls import TlsFiles, tls_of_client
from keepstep_mesh.security.tokens import ClientToken


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """``addresses``: ``http://host:port``, ``https://...`` or ``host:port`` of every lighthouse. Times in seconds.

    ``tls``: for https; without files the CAs of the system are trusted. Files of token and certificates are read again
    before each connection if they have changed.
    """

    addresses: tuple[str, ...]
    job: str
    replica_id: str
    token: str | ClientToken | None = None
    connect_timeout: float = 60.0
    """How long ``start`` tries."""
    heartbeat_interval: float = 0.1
    """A wish; the lighthouse has the last word."""
    library: str = ""
    """Name and version of the client, for people."""
    tls: TlsFiles = field(default_factory=TlsFiles)

    @classmethod
    def from_environment(
        cls,
        addresses: tuple[str, ...],
        replica_id: str,
        *,
        connect_timeout: float,
        heartbeat_interval: float = 0.1,
    ) -> SessionSettings:
        """With the job, the token and the certificates that the environment names."""
        _, job = from_environment("JOB") or ("", "default")
        return cls(
            addresses=addresses,
            job=job,
            replica_id=replica_id,
            token=ClientToken(),
            connect_timeout=connect_timeout,
            heartbeat_interval=heartbeat_interval,
            tls=tls_of_client(),
        )
