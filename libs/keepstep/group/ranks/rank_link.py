"""The interface between a rank and its group, equal for all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from keepstep.group.agreement import StepValues
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.group.ranks.merging import DisagreeError
from keepstep.rendezvous.key_value_server import KeyValueServer
from keepstep.session import session_events
from keepstep.session.liveness import Liveness
from keepstep.stacks.activity import Activity
from keepstep_mesh.errors import (
    Banned,
    JobClosed,
    KeepstepError,
    LayoutMismatch,
    SessionClosed,
)
from keepstep_mesh.protocol.group_messages import RankAsk, RankDenied, RankVote
from keepstep_mesh.protocol.membership import FinalState
from keepstep_mesh.protocol.messages import Healing, ServiceAddress, ShardReport
from keepstep_mesh.protocol.stack_messages import RankStacks

RANK_BEAT = 1.0
"""Seconds between heartbeats within a group."""
RANK_SILENCE = 5.0
"""Seconds of silence after which a rank counts as dead, unless the job's ``heartbeat_timeout`` is longer."""


def silence_limit(heartbeat_timeout: float) -> float:
    """Return the seconds of silence after which a rank counts as dead, for the job's ``heartbeat_timeout``."""
    return max(RANK_SILENCE, heartbeat_timeout)


def rank_liveness(heartbeat_timeout: float = 0.0) -> Liveness:
    """Return the schedule of heartbeats within a group, at either end of a connection."""
    return Liveness(RANK_BEAT, silence_limit(heartbeat_timeout))


class RankLink(Protocol):
    """How a rank takes part in its group: rank 0 through its ``GroupServer``, every other rank through a
    ``RankClient``.
    """

    replica_id: str
    address: str
    """Of the group server, as other groups know it."""
    layout_lines: list[str]
    """The layout of this rank, for a group that looks for a difference."""
    layout_changed: bool
    """Whether it has changed since this group's first step."""
    step_values: StepValues
    """Of this rank, for the same."""
    joins: str
    """See ``MemberInfo.joins``; rank 0 tells it."""
    activity: Activity
    """Of the training thread."""
    key_values: KeyValueServer | None
    """The rendezvous table, if this process serves it."""

    @property
    def services(self) -> tuple[ServiceAddress, ...]:
        """Relays and metrics services that are registered with the lighthouse."""

    @property
    def live_step(self) -> int:
        """Highest step of the other groups from which this one could heal when it connected; 0: none, or not rank 0."""

    @property
    def durable_relays(self) -> tuple[str, ...]:
        """Names of the relays that had the newest durable checkpoint of the job when this group connected; empty: none
        is known, or not rank 0.
        """

    def stored_at(self, relays: tuple[str, ...]) -> None:
        """Note the names of the relays that have the newest durable checkpoint. Rank 0 tells the lighthouse. From any
        thread.
        """

    async def ask(self, ask: RankAsk) -> QuorumPlan:
        """Return the plan of the group's next step, once all ranks have asked.

        Raises:
            TimeoutError: no quorum formed in time.
            Leaving: the group has left the job.
            CollectivesMismatch: the group began another number of collectives than others.
            ReplicasDiverged: the weights of the group differ from those of others, and no heal repairs that.
            LayoutMismatch: parameters or settings differ from the job's.
            JobClosed: the groups of the job have finished.
            SessionClosed: the group or its session has ended.
            KeepstepError: anything else.
        """

    async def vote(self, vote: RankVote, timeout: float) -> bool:
        """Return the group's decision. TimeoutError if a rank does not vote within ``timeout`` seconds."""

    def finished_step(self) -> None:
        """Note that the step of the last answer was committed or discarded. From any thread."""

    def healing(self, progress: Healing) -> None:
        """Report the progress of this rank's heal. The lighthouse gets the sum over all ranks."""

    def shards(self, report: ShardReport) -> None:
        """Report the shard of this rank. The lighthouse gets one report of all ranks."""

    def stacks(self, found: RankStacks) -> None:
        """Send the stacks of this rank to the lighthouse."""

    def request_leave(self, reason: str) -> None:
        """Prepare to leave at the next step. A request that stays without an answer is given up for it."""

    async def leave(self, reason: str, timeout: float, *, cause: str = "", step: int | None = None) -> None:
        """Say goodbye, and wait up to ``timeout`` seconds for its confirmation. TimeoutError otherwise.

        ``cause`` and ``step``: as in ``Leave``.
        """

    async def fail(self, reason: str) -> None:
        """Report that the group is lost as a whole."""

    async def close(self) -> None:
        """End the link. May be called more than once."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of a group server."""

    world_size: int
    """Number of ranks in the group."""
    host: str
    """Address to advertise and to bind to."""
    port: int = 0
    """0: any free one."""
    restart: int = 0
    """The launcher's restart count; ranks of another count are refused."""
    store_address: str = ""
    """Store over which the members of a quorum build their process groups; empty: this server's."""
    quorum_retries: int = 0
    """Number of times that a quorum that timed out is requested again."""
    rank_0_connects: bool = False
    """Whether rank 0 is a client like the others (``coordination.ManagerServer``)."""
    product: str = ""
    """See ``MemberInfo.product``."""


class Leaving(KeepstepError):
    """The group has left the job on purpose. The training thread raises ``Drained`` for it."""


_DENIALS: Mapping[str, type[Exception]] = {
    "leaving": Leaving,
    "disagree": DisagreeError,
    "banned": Banned,
    "closed": SessionClosed,
    **session_events.DENIALS,
}
"""Code of a denied request: the error that it stands for, special ones first. Any other stands for KeepstepError."""


def denied(request: int, error: Exception) -> RankDenied:
    """Encode the error of a request, for the rank that sent it."""
    code = next((code for code, kind in _DENIALS.items() if isinstance(error, kind)), "failed")
    expected = isinstance(error, (TimeoutError, KeepstepError))
    reason = str(error) if expected else f"{type(error).__name__}: {error}"
    if isinstance(error, JobClosed):
        final = FinalState(error.step, error.lineage, error.groups, error.closed_ms)
        return RankDenied(request, "finished" if error.finished else code, reason, "", final)
    if isinstance(error, LayoutMismatch):
        return RankDenied(request, code, reason, error.peer_address, peer_step=error.peer_step)
    return RankDenied(request, code, reason)


def denial(denied: RankDenied) -> Exception:
    """Decode the error of a request."""
    if denied.job_closed is not None:
        return session_events.of_final(denied.reason, denied.job_closed, finished=denied.code == "finished")
    return session_events.of_kind(_DENIALS.get(denied.code, KeepstepError), denied)
