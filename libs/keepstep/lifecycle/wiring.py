"""Build the parts of a Manager, and close them."""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import Any

import torch.distributed as dist

from keepstep.checkpointing.relay_transport import RelayTransport
from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.group.compared_layout import ComparedLayout
from keepstep.group.group_link import connect_group
from keepstep.group.ranks.rank_link import RankLink
from keepstep.lifecycle.manager_settings import ManagerSettings
from keepstep.lifecycle.membership import GroupMembership
from keepstep.runtime.exits import EvictedExit
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.step.asks import Asks
from keepstep.step.context import StepContext
from keepstep.step.evidence.failure_evidence import FailureEvidence
from keepstep.step.live_state import LiveState
from keepstep.step.progress import GroupProgress
from keepstep.step.rank_votes import RankVotes
from keepstep.step.reconfigurer import Reconfigurer
from keepstep.step.reporting.step_log import StepLog
from keepstep.step.reporting.step_telemetry import OnStep, StepTelemetry
from keepstep.step.step_faults import StepFaults
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import Banned
from keepstep_mesh.protocol.lineage import NEW
from keepstep_mesh.security.tls import as_safe

log = get_logger("keepstep.manager")

STREAMS = 4
"""Parallel streams of a heal without a relay; measured faster than one and than sixteen."""


def connect(
    settings: ManagerSettings,
    pg: dist.ProcessGroup,
    transport: CheckpointTransport[dict[str, Any]] | None,
    membership: GroupMembership,
    on_step: OnStep | None = None,
) -> StepContext:
    """Connect to the group and the lighthouse, and build what all steps of this process share.

    Args:
        settings: of the Manager.
        pg: process group over the replica groups.
        transport: of live state; None: a ``RelayTransport``.
        membership: gets what the lighthouse pushes, and the end of the group.
        on_step: of the Manager.

    Raises:
        TimeoutError, KeepstepError, EvictedExit, ValueError: as ``Manager``; all that was opened is closed again.
    """
    loop_thread, own = LoopThread(), settings.link
    with contextlib.ExitStack() as closing:
        closing.callback(loop_thread.stop)
        try:
            link, store = connect_group(loop_thread, own, membership.on_group_failed, membership.on_push)
        except Banned as error:
            raise EvictedExit(str(error)) from error
        closing.callback(lambda: loop_thread.call(link.close(), CALL_MARGIN_SECONDS))
        if transport is None:
            transport = _relay_transport(settings, link)
            closing.callback(transport.shutdown)
        progress = GroupProgress(link.replica_id, f"{NEW}{link.replica_id}" if settings.init_sync else "")
        named_log = log.bind(replica_id=link.replica_id, rank=own.rank)
        reconfigurer = Reconfigurer(
            pg,
            job=own.job,
            replica_id=link.replica_id,
            group_rank=own.rank,
            group_world_size=own.world_size,
            token=own.token,
            host=own.host,
            key_values=link.key_values,
            own_address=link.address,
            timeout=settings.timeout,
        )
        settings_of_job = settings.of_job(getattr(pg, "job_settings", {}))
        compared = ComparedLayout(loop_thread, link, own.token, settings_of_job, own.rank)
        alone, timeout = own.world_size == 1, settings.timeout.total_seconds()
        context = StepContext(
            loop_thread=loop_thread,
            link=link,
            settings=own,
            reconfigurer=reconfigurer,
            transport=transport,
            state=LiveState(progress.state_dict, progress.load, named_log),
            progress=progress,
            steps=StepLog(own.job, link.replica_id, own.rank),
            telemetry=StepTelemetry(loop_thread, link, own, on_step),
            log=named_log,
            timeout=settings.timeout,
            evidence=FailureEvidence(timeout),
            min_replica_size=settings.min_replica_size,
            world_size_mode=settings.world_size_mode,
            compared=compared,
            asks=Asks(progress, compared, reconfigurer, transport.metadata, stands_by=own.stands_by),
            ranks=RankVotes(loop_thread, link, progress, alone=alone, timeout=timeout),
            refuse_nonfinite=settings.refuse_nonfinite,
            faults=StepFaults.accepted(),
            store=store,
        )
        closing.pop_all()
    return context


def _relay_transport(settings: ManagerSettings, link: RankLink) -> RelayTransport[dict[str, Any]]:
    own = settings.link

    def relays() -> list[str]:
        lighthouse = own.session.addresses[0]
        return [as_safe(one.address, lighthouse) for one in link.services if one.service == "relay"]

    return RelayTransport(
        timeout=settings.timeout,
        relays=relays,
        num_chunks=STREAMS,
        hostname=own.host,
        token=own.token,
        tls=own.session.tls,
        uplink=settings.uplink,
    )


def disconnect(context: StepContext, limit: float, *, wait: bool) -> None:
    """Close every part of ``context``.

    Args:
        context: not used afterwards.
        limit: seconds for closing the connections of the group.
        wait: whether to wait until the transport has freed its threads, ports and buffers.
    """
    if context.faults is not None:
        context.faults.close()
    context.reconfigurer.shutdown()
    if context.follower is not None:
        context.follower.close()
    context.transport.shutdown(wait=wait)
    context.telemetry.close()
    with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
        context.loop_thread.call(context.link.close(), limit)
    context.loop_thread.stop()
    context.store = None
    context.steps.close()
