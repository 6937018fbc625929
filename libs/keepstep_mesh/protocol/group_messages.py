"""Messages between a rank and rank 0 of its replica group, one frozen dataclass each; on the wire as in ``messages``.

``Heartbeat``, ``Healing``, ``Leave``, ``Goodbye``, ``Failed``, ``MemberLost``, ``RoundBroken``, ``Drain``, ``Evicted``,
``Timing`` and ``Services`` travel here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepstep_mesh.protocol.membership import Lineage, Quorum, StateRoot


@dataclass(frozen=True, slots=True)
class RankHello:
    """A local rank opens its connection to the group server."""

    kind: ClassVar[str] = "rank_hello"
    version: int
    oldest_version: int
    group_rank: int
    world_size: int
    restart: int
    """The launcher's restart count; ranks of different counts never meet."""
    keeps_list: bool = False
    """The rank keeps the last member list: rank 0 need not send it again on this connection."""


@dataclass(frozen=True, slots=True)
class RankReady:
    kind: ClassVar[str] = "rank_ready"
    version: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class RankAsk:
    """A local rank is ready for the next step. The group asks the lighthouse when all its ranks have."""

    kind: ClassVar[str] = "rank_ask"
    request: int
    step: int
    lineage: Lineage
    shrink_only: bool
    commit_failures: int
    timeout_ms: int
    leaving: str = ""
    """Not empty: this rank was told to leave (SIGTERM), and so the group does."""
    layout: str = ""
    handle: str = ""
    checkpoint: str = ""
    """What a peer's transport needs to fetch this rank's state."""
    root: StateRoot | None = None
    """Of this rank's part of the state."""
    batches_committed: int = 0
    allow_heal: bool = True
    """As in ``QuorumRequest``."""
    settings: str = ""
    """As in ``QuorumRequest``, with every request."""


@dataclass(frozen=True, slots=True)
class RankQuorum:
    kind: ClassVar[str] = "rank_quorum"
    request: int
    attempt: int
    """Number of the group's request; part of the key of its votes."""
    quorum: Quorum
    """``listed`` is empty when it is the list that was sent last on this connection (``RankHello.keeps_list``)."""
    list_number: int = 0
    """Changes with the member list; 0: from a rank 0 that sends every list."""
    heal_timeout_ms: int = 0
    """As in the welcome."""


@dataclass(frozen=True, slots=True)
class RankDenied:
    """``code``: one of ``DENIALS``, or ``disagree``, ``leaving``, ``closed``, ``failed``."""

    kind: ClassVar[str] = "rank_denied"
    request: int
    code: str
    reason: str
    peer_address: str = ""


@dataclass(frozen=True, slots=True)
class RankVote:
    """A local rank's vote on one attempt at one step. Votes of another key are never counted together."""

    kind: ClassVar[str] = "rank_vote"
    epoch: int
    quorum_id: int
    step: int
    attempt: int
    ok: bool


@dataclass(frozen=True, slots=True)
class RankDecision:
    kind: ClassVar[str] = "rank_decision"
    epoch: int
    quorum_id: int
    step: int
    attempt: int
    ok: bool


WithinGroup = RankHello | RankReady | RankAsk | RankQuorum | RankDenied | RankVote | RankDecision
