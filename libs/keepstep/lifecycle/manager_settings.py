"""The settings of a Manager: its arguments, completed from the environment and validated."""

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

    @classmethod
    def from_arguments(
        cls,
        every: int,
        resume: bool | None,
        relays: str | None,
        copies: int,
        *,
        newest_wins: bool,
        resume_wait: timedelta,
    ) -> DurableSettings:
        """Complete the arguments from the environment and validate them. ValueError names what is out of range."""
        addresses = environment.variable("DURABLE_RELAYS") or relays
        copies = environment.integer("DURABLE_COPIES", copies)
        if copies < 1:
            raise ValueError(f"durable_copies={copies} must be at least 1; it is the number of relays that store each")
        return cls(
            every=environment.integer("DURABLE_EVERY", every),
            resume=environment.flag("RESUME", resume),
            relays=split_addresses(addresses) if addresses else (),
            copies=copies,
            newest_wins=bool(environment.flag("DURABLE_NEWEST_WINS", newest_wins)),
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

    @classmethod
    def from_arguments(
        cls,
        *,
        min_replica_size: int,
        use_async_quorum: bool,
        timeout: timedelta,
        quorum_timeout: timedelta,
        connect_timeout: timedelta,
        rank: int | None,
        world_size: int | None,
        world_size_mode: WorldSizeMode,
        store_addr: str | None,
        store_port: int | None,
        lighthouse_addr: str | None,
        replica_id: str | None,
        port: int | None,
        hostname: str | None,
        heartbeat_interval: timedelta,
        init_sync: bool,
        max_retries: int | None,
        quorum_retries: int,
        refuse_nonfinite: bool,
        retry_allreduce: bool,
        durable_every: int,
        resume: bool | None,
        durable_relays: str | None,
        durable_copies: int,
        durable_newest_wins: bool,
        resume_wait: timedelta,
    ) -> ManagerSettings:
        """Complete the arguments from the environment and validate them.

        Raises:
            ValueError: a value is missing or out of range; the message names it and what is allowed.
        """
        if min_replica_size < 1:
            raise ValueError(
                f"min_replica_size={min_replica_size} must be at least 1; it is the number of groups that must take "
                f"part in a step"
            )
        if max_retries is not None and max_retries < 0:
            raise ValueError(f"max_retries={max_retries} must be at least 0; pass None for no limit")
        return cls(
            link=LinkSettings.from_arguments(
                lighthouse_addr=lighthouse_addr,
                replica_id=replica_id,
                rank=environment.from_launcher("RANK", rank, 0),
                world_size=environment.from_launcher("WORLD_SIZE", world_size, 1),
                store_addr=store_addr,
                store_port=store_port,
                port=port,
                hostname=hostname,
                heartbeat_interval=heartbeat_interval.total_seconds(),
                connect_timeout=environment.seconds("CONNECT_TIMEOUT_SEC", connect_timeout).total_seconds(),
                quorum_retries=environment.integer("QUORUM_RETRIES", quorum_retries),
            ),
            timeout=environment.seconds("TIMEOUT_SEC", timeout),
            quorum_timeout=environment.seconds("QUORUM_TIMEOUT_SEC", quorum_timeout),
            min_replica_size=min_replica_size,
            use_async_quorum=use_async_quorum,
            world_size_mode=world_size_mode,
            init_sync=init_sync,
            max_retries=max_retries,
            refuse_nonfinite=refuse_nonfinite,
            retry_allreduce=bool(environment.flag("RETRY_ALLREDUCE", retry_allreduce)),
            durable=DurableSettings.from_arguments(
                durable_every,
                resume,
                durable_relays,
                durable_copies,
                newest_wins=durable_newest_wins,
                resume_wait=resume_wait,
            ),
            uplink=environment.rate("UPLINK_BYTES_PER_SECOND"),
        )

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
