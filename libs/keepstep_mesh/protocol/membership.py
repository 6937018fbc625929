"""Parts of messages that describe groups and quorums; on the wire the list of their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from keepstep_mesh.text import printable

MAX_DATA_BYTES = 64 * 1024
"""Limit of ``MemberInfo.data``, packed."""

Lineage = int | str
"""Identity of a group's weights: the quorum_id of its last commit; before the first one its incarnation or ``""``."""

Sentence = Annotated[str, printable]
"""Text for people. When it is decoded, control characters become escapes: other processes log it and show it."""

Data = object
"""Any msgpack value. Its size is checked, its content is not."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """Properties of a group that rarely change; sent with a request only after a change."""

    address: str = ""
    """Base URL of the group server, ``http://host:port``."""
    store_address: str = ""
    """Rendezvous of the process groups: ``http://host:port`` of a group server, or ``host:port`` of a TCPStore."""
    world_size: int = 1
    """Number of ranks of the group."""
    layout: str = ""
    """Digest of parameter names, shapes, dtypes and bucket layout; empty while unknown."""
    data: Data = None
    rendezvous: int = 1
    """Version of the rendezvous that its ranks understand."""


@dataclass(frozen=True, slots=True)
class Member:
    """One group of a quorum, as announced."""

    replica_id: str
    step: int
    lineage: Lineage
    commit_failures: int
    shrink_only: bool
    info: MemberInfo
    batches_committed: int = 0
    """0 also from an older lighthouse."""


@dataclass(frozen=True, slots=True)
class StateRoot:
    """Root digest of the live state that a group held at (``step``, ``lineage``): equal for equal states."""

    step: int
    lineage: Lineage
    digest: str
    """Hexadecimal. For a group of several ranks: the digest of its ranks' digests."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a group on a step, sent with its next request."""

    quorum_id: int
    step: int
    """Of the reference state at the begin of the step."""
    committed: bool
    collectives: int
    """Number of collectives that the group began, over all its ranks. If ``committed``, all of them succeeded."""
    nonfinite: bool = False
    """The group contributed a NaN or an infinity."""
    quantized: int = 0
    """Number of these collectives that sent encoded values (``should_quantize``, codecs)."""
    values: str = ""
    """Digest of the values with which the optimizers stepped: learning rates and the like; empty: unknown."""

    @property
    def step_after(self) -> int:
        """Committed steps of the group after this one."""
        return self.step + self.committed


OWN, PEER, UNKNOWN = "own", "peer", "unknown"
"""Values of ``StepFailure.cause``."""
UNPUBLISHED, TO_PUBLISH, PUBLISHED = "no", "wanted", "done"
"""Values of ``QuorumRequest.publish``."""
MAX_PEERS = 64
"""Limit of ``StepFailure.peers``."""
MAX_FAILURE_REASON = 200
"""Limit of ``StepFailure.reason``, in characters."""


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Why a step failed in a group, sent with its next request."""

    quorum_id: int
    """Of the failed step."""
    cause: str
    """``own``: an error of this group, before any connection to another group failed. ``peer``: groups that it cannot
    reach. ``unknown``: neither is known."""
    peers: tuple[str, ...] = ()
    """replica_ids of the groups that it cannot reach; with ``peer`` only."""
    reason: Sentence = ""
    """The error, for operators."""


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """The answer of the step in progress: received, and the step has neither committed nor failed yet."""

    epoch: int
    quorum_id: int
    step: int
    """``max_step`` of that answer."""


@dataclass(frozen=True, slots=True)
class FinalState:
    """State at which the groups of a job finished together."""

    step: int
    lineage: Lineage
    groups: int
    """Number of these groups."""
    closed_ms: int
    """Unix time at which the job was closed."""
    root: str = ""
    """As in ``StateRoot.digest``; empty: the groups did not compare their weights."""
