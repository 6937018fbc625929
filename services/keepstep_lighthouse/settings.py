"""Settings of a lighthouse. Flags override the environment, which overrides the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from keepstep_lighthouse.store.opening import checked_store
from keepstep_mesh.config.settings import Settings, boolean, duration, whole
from keepstep_mesh.protocol.policy import Policy, policy_problem
from keepstep_mesh.serving.listen_settings import ListenSettings, read_listen_settings


@dataclass(frozen=True, kw_only=True)
class LighthouseSettings(ListenSettings):
    """Settings of a lighthouse.

    Attributes:
        policy: of new jobs; a stored job keeps its own.
        event_log: file of JSON lines; None: no file.
        max_jobs: limit; no new job is created beyond it.
        lease: seconds, for a shared store: a leader that is silent for longer is replaced. Workers and other
            lighthouses then reach this one at ``advertise``.
    """

    bind: str = "127.0.0.1:29510"
    store: str = "memory://"
    policy: Policy = field(default_factory=Policy)
    event_log: Path | None = None
    lease: float = 10.0
    max_jobs: int = 1000


MIN_LEASE = 3.0
"""etcd has no lease below 2 s, and a renewal takes some time."""


def _lease(seconds: float) -> float:
    if seconds < MIN_LEASE:
        raise ValueError(f"lease must be at least {MIN_LEASE:g} s, not {seconds:g}")
    return seconds


def _max_jobs(count: int) -> int:
    if count < 1:
        raise ValueError(f"max_jobs must be at least 1, not {count}")
    return count


def _reader(default: object) -> Callable[[Any], Any]:
    """Return the parser of a policy field that has this default."""
    readers: dict[type, Callable[[Any], Any]] = {int: whole, str: str, bool: boolean}
    return readers.get(type(default), duration)


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> LighthouseSettings:
    """Read the settings of a lighthouse.

    Args:
        flags: by name: ``store``, ``lease``, ``max_jobs``, ``event_log``, the fields of ``Policy`` (times in seconds),
            and those of ``read_listen_settings``.
        environ: has them as ``KEEPSTEP_LIGHTHOUSE_<NAME>``.

    Raises:
        ValueError: a value is invalid.
        AuthError: a token is invalid.
        StoreError: the kind of store is unknown.
    """
    given = {f"lighthouse_{name}": value for name, value in flags.items()}
    settings = Settings(flags=given, environ=environ)
    default = LighthouseSettings()

    limits: dict[str, Any] = {}
    for one in fields(Policy):
        limits[one.name] = settings.get(
            f"lighthouse_{one.name}", _reader(one.default), getattr(default.policy, one.name)
        )
    policy = Policy(**limits)
    if (problem := policy_problem(policy)) is not None:
        raise ValueError(problem)
    return LighthouseSettings(
        **read_listen_settings(settings, "lighthouse", default.bind),
        store=checked_store(settings.get("lighthouse_store", str, default.store)),
        policy=policy,
        event_log=settings.path("lighthouse_event_log"),
        lease=_lease(settings.get("lighthouse_lease", duration, default.lease)),
        max_jobs=_max_jobs(settings.get("lighthouse_max_jobs", whole, default.max_jobs)),
    )
