"""The settings of a Manager: its arguments, completed from the environment by the Manager, and validated here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from keepstep.group.agreement import group_settings
from keepstep.group.group_link import LinkSettings
from keepstep.group.quorum_plan import WorldSizeMode
from keepstep.runtime import environment
from keepstep_mesh.config.settings import split_addresses


@dataclass(frozen=True, slots=True)
class DurableSettings:
    """Settings of durable checkpoints. See ``Manager`` for what each one means."""

    every: int
    resume: bool | None
    relays: tuple[str, ...]
    """Empty: those that are registered with the lighthouse."""
    copies: int
    newest_wins: bool
    resume_wait: float
    """Seconds."""

    def __post_init__(self) -> None:
        if self.copies < 1:
            raise ValueError(
                f"durable_copies={self.copies} must be at least 1; it is the number of relays that store each"
            )

    @classmethod
    def from_arguments(
        cls,
        *,
        durable_every: int,
        resume: bool | None,
        durable_relays: str | None,
        durable_copies: int,
        durable_newest_wins: bool,
        resume_wait: timedelta,
    ) -> DurableSettings:
        """Complete the arguments from the environment."""
        relays = environment.variable("DURABLE_RELAYS") or durable_relays
        return cls(
            every=environment.integer("DURABLE_EVERY", durable_every),
            resume=environment.flag("RESUME", resume),
            relays=split_addresses(relays) if relays else (),
            copies=environment.integer("DURABLE_COPIES", durable_copies),
            newest_wins=bool(environment.flag("DURABLE_NEWEST_WINS", durable_newest_wins)),
            resume_wait=environment.seconds("RESUME_WAIT_SEC", resume_wait).total_seconds(),
        )

    @property
    def resumes(self) -> bool:
        """Whether a group without a state loads the newest checkpoint by itself."""
        return self.every > 0 if self.resume is None else self.resume


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """Arguments and environment variables of a ``Manager``, checked. See there for their meaning."""

    link: LinkSettings
    timeout: timedelta
    quorum_timeout: timedelta
    min_replica_size: int
    use_async_quorum: bool
    world_size_mode: WorldSizeMode
    init_sync: bool
    max_retries: int | None
    refuse_nonfinite: bool
    retry_allreduce: bool
    durable: DurableSettings
    uplink: float | None
    """Limit of what this process uploads when other groups heal from it, in bytes per second; None: no limit."""

    def __post_init__(self) -> None:
        if self.min_replica_size < 1:
            raise ValueError(
                f"min_replica_size={self.min_replica_size} must be at least 1; it is the number of groups that must "
                f"take part in a step"
            )
        if self.max_retries is not None and self.max_retries < 0:
            raise ValueError(f"max_retries={self.max_retries} must be at least 0; pass None for no limit")

    def of_job(self, process_group: Mapping[str, str]) -> str:
        """Return the settings that must be equal in all groups of the job, as text.

        Args:
            process_group: those of the process group.
        """
        return group_settings(
            use_async_quorum=self.use_async_quorum,
            world_size_mode=self.world_size_mode,
            min_replica_size=self.min_replica_size,
            init_sync=self.init_sync,
            refuse_nonfinite=self.refuse_nonfinite,
            durable_every=self.durable.every,
            retry_allreduce=self.retry_allreduce,
            spares=self.link.spares,
            process_group=process_group,
        )
