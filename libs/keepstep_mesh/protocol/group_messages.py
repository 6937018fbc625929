"""Messages between a rank and rank 0 of its replica group, one frozen dataclass each; on the wire as in ``messages``.

``Heartbeat``, ``Healing``, ``Leave``, ``Goodbye``, ``Failed``, ``MemberLost``, ``RoundBroken``, ``Drain``, ``Evicted``,
``Timing`` and ``Services`` are also sent within a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepstep_mesh.protocol.membership import FinalState, Sentence
from keepstep_mesh.protocol.messages import Quorum, StepRequest


@dataclass(frozen=True, slots=True)
class RankHello:
    """Opens the connection of a rank to the group server."""

    kind: ClassVar[str] = "rank_hello"
    version: int
    oldest_version: int
    group_rank: int
    world_size: int
    restart: int
    """Restart count of the launcher; ranks with different counts never form a group."""
    keeps_list: bool = False
    """The rank keeps the last member list, so rank 0 does not send it again on this connection."""


@dataclass(frozen=True, slots=True)
class RankReady:
    kind: ClassVar[str] = "rank_ready"
    version: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class RankAsk(StepRequest):
    """A rank is ready for the next step. The group sends its request when all its ranks are ready.

    Rank 0 adds ``info`` and ``durable_relays``.
    """

    kind: ClassVar[str] = "rank_ask"
    leaving: Sentence = ""
    """Reason why this rank, and so the group, leaves (SIGTERM); empty: it stays."""
    layout: str = ""
    """As in ``MemberInfo``, of this rank."""
    checkpoint: str = ""
    """Metadata with which a peer's transport fetches this rank's state."""
    sharded: bool = False
    """The model exists once: the ranks may be a step apart, and those behind come to the state of the others."""


@dataclass(frozen=True, slots=True)
class RankQuorum:
    kind: ClassVar[str] = "rank_quorum"
    request: int
    attempt: int
    """Number of the group's request; part of the key of votes."""
    quorum: Quorum
    """``listed`` is empty if the list is the last one sent on this connection (``RankHello.keeps_list``)."""
    list_number: int = 0
    """Changes with the member list; 0: rank 0 sends every list."""
    heal_timeout_ms: int = 0
    """As in ``Welcome``."""


@dataclass(frozen=True, slots=True)
class RankDenied:
    """``code``: one of ``Denied``, or ``finished``, ``disagree``, ``leaving``, ``closed``, ``failed``."""

    kind: ClassVar[str] = "rank_denied"
    request: int
    code: str
    reason: Sentence
    peer_address: str = ""
    job_closed: FinalState | None = None
    """With code ``finished`` (``Closed``) or ``start`` (``Denied.closed``): the final state of the job."""
    peer_step: int = 0
    """As in ``Denied``."""


@dataclass(frozen=True, slots=True)
class RankVote:
    """The vote of a rank on one attempt at one step. Only votes with equal keys are counted together."""

    kind: ClassVar[str] = "rank_vote"
    epoch: int
    quorum_id: int
    step: int
    attempt: int
    ok: bool
    poll: int = 0
    """0: the vote on the step. Else the number of a poll of the ranks, which asks whether all of them are ready."""


@dataclass(frozen=True, slots=True)
class RankDecision:
    kind: ClassVar[str] = "rank_decision"
    epoch: int
    quorum_id: int
    step: int
    attempt: int
    ok: bool
    poll: int = 0
    """As in ``RankVote``."""


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    """Send what the groups compare of this rank: another group looks for a difference."""

    kind: ClassVar[str] = "compared?"
    number: int
    """The answer has the same number."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Layout and values of a rank, as the groups compare them. Both are empty if they are too long for a message."""

    kind: ClassVar[str] = "compared"
    number: int
    lines: tuple[str, ...] = ()
    """Of its layout."""
    values: tuple[str, ...] = ()
    """Of its last steps: step, name and text, with tabs between."""


WithinGroup = (
    RankHello | RankReady | RankAsk | RankQuorum | RankDenied | RankVote | RankDecision | ComparedRequest | Compared
)
