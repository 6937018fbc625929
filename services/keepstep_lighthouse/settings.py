"""What a lighthouse can be told, and where it is read from: flags beat the environment beats a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from keepstep_lighthouse.events import Policy
from keepstep_lighthouse.policies import policy_problem
from keepstep_lighthouse.store import checked_store
from keepstep_mesh.auth import Tokens, watched_tokens
from keepstep_mesh.reloading import FromFiles
from keepstep_mesh.settings import Settings, base_url, bind_address, boolean, duration, whole
from keepstep_mesh.tls import TlsFiles, tls_of_client, tls_of_service


@dataclass(frozen=True)
class LighthouseSettings:
    """``bind``: host:port, port 0 for any free one. ``policy``: of each job that is new; a known one keeps its own.

    ``event_log``: a file of JSON lines, if any. ``tls``: files of its certificate; without, it speaks plain HTTP.
    ``insecure``: listen beyond this machine without a token. For a store of several lighthouses, ``lease``: seconds
    after which a leader that is not heard of any more is succeeded, ``advertise``: where workers and other
    lighthouses reach this one, and ``peer_tls``: certificates for its links to them.
    """

    bind: str = "127.0.0.1:29510"
    store: str = "memory://"
    policy: Policy = field(default_factory=Policy)
    tokens: Tokens | FromFiles[Tokens] = field(default_factory=Tokens)
    tls: TlsFiles = field(default_factory=TlsFiles)
    event_log: Path | None = None
    insecure: bool = False
    lease: float = 10.0
    advertise: str | None = None
    peer_tls: TlsFiles = field(default_factory=TlsFiles)


MIN_LEASE = 3.0
"""etcd knows no lease below 2 s, and a renewal takes its time."""


def _lease(seconds: float) -> float:
    if seconds < MIN_LEASE:
        raise ValueError(f"lease must be at least {MIN_LEASE:g} s, not {seconds:g}")
    return seconds


def _bind(text: str) -> str:
    try:
        bind_address(text)
    except ValueError as error:
        raise ValueError(f"bind {text!r}: {error}") from error
    return text


def read_like(default: object) -> Callable[[Any], Any]:
    """What reads a field of the policy that has this default."""
    readers: dict[type, Callable[[Any], Any]] = {int: whole, str: str}
    return readers.get(type(default), duration)


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Mapping[str, Any] | None = None
) -> LighthouseSettings:
    """``flags``: ``bind``, ``store``, ``event_log``, ``insecure``, ``token_file``, ``tls_cert``, ``tls_key``,
    ``tls_ca``, the fields of ``Policy`` (seconds).

    In the environment they are ``KEEPSTEP_LIGHTHOUSE_<NAME>``, in the file ``lighthouse_<name>``. Raises ``ValueError``
    that names what is wrong, ``AuthError`` for tokens, ``StoreError`` for a store that there is not.
    """
    given = {f"lighthouse_{name}": value for name, value in flags.items()}
    settings = Settings(flags=given, environ=environ, file=file or {})
    default = LighthouseSettings()

    def path(name: str) -> Path | None:
        return settings.get(f"lighthouse_{name}", lambda text: Path(text), None)  # noqa: PLW0108 - mypy

    limits: dict[str, Any] = {}
    for one in fields(Policy):
        limits[one.name] = settings.get(
            f"lighthouse_{one.name}", read_like(one.default), getattr(default.policy, one.name)
        )
    policy = Policy(**limits)
    if (problem := policy_problem(policy)) is not None:
        raise ValueError(problem)
    tls = tls_of_service(settings, "lighthouse")
    advertise = settings.get("lighthouse_advertise", str, None)
    if advertise is not None:
        advertise = base_url(advertise if "://" in advertise else f"{'https' if tls else 'http'}://{advertise}")
    return LighthouseSettings(
        bind=_bind(settings.get("lighthouse_bind", str, default.bind)),
        store=checked_store(settings.get("lighthouse_store", str, default.store)),
        policy=policy,
        tokens=watched_tokens(environ, path("token_file")),
        tls=tls,
        event_log=path("event_log"),
        insecure=settings.get("lighthouse_insecure", boolean, default=False),
        lease=_lease(settings.get("lighthouse_lease", duration, default.lease)),
        advertise=advertise,
        peer_tls=tls_of_client(environ=environ) or tls,
    )
