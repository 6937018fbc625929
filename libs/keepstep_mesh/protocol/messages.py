"""Messages between a worker and the lighthouse, one frozen dataclass each.

On the wire a message is a msgpack array: its kind, then its fields in the order of the class.
``keepstep_mesh.protocol.codec`` encodes, decodes, and checks every field. A release works together with the one before:

* New fields are appended, with a default. A reader ignores fields that it does not know.
* ``PROTOCOL_VERSION`` grows with a new kind of message, and with a field whose loss would do harm. The sender looks at
  the version of its peer before it relies on either.
* ``OLDEST_PROTOCOL_VERSION`` is at most the version of the release before. Older peers are refused.

A worker opens a session with ``Hello``. The lighthouse answers no other message before it has sent ``Welcome``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepstep_mesh.protocol.membership import (
    FinalState,
    HeldAnswer,
    Lineage,
    Member,
    MemberInfo,
    Sentence,
    StateRoot,
    StepFailure,
    StepReport,
)
from keepstep_mesh.protocol.stack_messages import Hung, RankStacks, StacksRequest

PROTOCOL_VERSION = 7
"""Version of this build."""
OLDEST_PROTOCOL_VERSION = 7
"""Oldest version that this build works with. Workers of version 6 do not know the request for stacks."""

MAX_HEAL_ERROR = 1000
"""Limit of ``Healing.error``, in characters."""

Detail = str | float | bool | None
"""A value that a service publishes about itself."""


# ---- worker to lighthouse


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session. ``epoch_seen`` and ``quorum_id_seen`` are the highest that the group has received (0: none)."""

    kind: ClassVar[str] = "hello"
    version: int
    oldest_version: int
    replica_id: str
    epoch_seen: int = 0
    quorum_id_seen: int = 0
    held: HeldAnswer | None = None
    heartbeat_interval_ms: int = 0
    """Interval that the worker asks for; 0: the lighthouse chooses."""
    library: Sentence = ""
    """Name and version of the client, which an error about protocol versions names."""
    host: Sentence = ""
    """Name of its machine."""
    runtime: Sentence = ""
    """Versions and processor that its arithmetic depends on, such as ``python 3.11.7, torch 2.9.1 on NVIDIA H100``;
    empty: unknown."""
    groups: int = 0
    """Number of groups of the job, which its first quorum waits for; 0: unknown."""
    standby: bool = False
    """The group has been in no quorum yet, and waits as a spare while the job has ``groups`` without it."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The fields of a request for the quorum of the next step, of a group and of each of its ranks.

    A new field moves those of ``RankAsk``, so it needs a new ``PROTOCOL_VERSION``, which the ranks of a group compare.
    """

    request: int
    """Number of the request; grows within an incarnation. A session sets it: pass 0 to ``LighthouseSession.quorum``."""
    step: int
    lineage: Lineage
    shrink_only: bool
    commit_failures: int
    timeout_ms: int
    """Time from now after which the sender gives up."""
    info: MemberInfo | None = None
    """None: unchanged since the previous request of this session, or not rank 0's part."""
    root: StateRoot | None = None
    """Set if the previous answer asked for it and the group holds the reference state, and with ``final``. That of a
    rank is of its part of the state."""
    batches_committed: int = 0
    """Batches committed up to ``step``."""
    allow_heal: bool = True
    """False: no group may heal in this round."""
    settings: str = ""
    """Settings that all groups must share, one line ``name value`` each; a group sends them with ``info``, a rank with
    every request. Empty: unknown."""
    last_step: StepReport | None = None
    """The sender's last step under a quorum. None: no step yet, or it was abandoned."""
    min_groups: int = 0
    """The group trains while it asks: so many groups form a quorum after ``grace_ms``. 0: the group waits, and the
    policy decides alone."""
    grace_ms: int = 0
    """Time from the request of the ``min_groups``-th group, after which the quorum forms without the others."""
    final: bool = False
    """The sender has taken its last step. Answered with ``Closed`` when all groups have, at one (step, lineage)."""
    durable_relays: tuple[str, ...] = ()
    """Names of the relays that committed the newest durable checkpoint of this group; empty: none, or unchanged since
    the previous request of this session."""
    failure: StepFailure | None = None
    """Why the sender's last step failed. None: it did not, or the cause has nothing to do with this or another group.
    """
    retry: bool = False
    """The group takes its last step again, with the gradients that it has. Denied with code ``retry`` if another group
    has committed that step. Always with ``shrink_only`` and ``commit_failures``."""
    replace: Sentence = ""
    """Why the group must leave soon: a spare replaces it, or it is drained. Empty: it stays."""
    publish: str = ""
    """With ``final``, whether the final state goes to the relays before the job is closed, equal in all groups: ``no``,
    ``wanted`` (answered with a quorum when all groups have finished at one state), ``done``. Empty: unknown."""
    multiple: int = 1
    """A quorum has a multiple of so many groups, because the mesh of a model that exists once has that shape."""


@dataclass(frozen=True, slots=True)
class QuorumRequest(StepRequest):
    """The group is ready for the next step. Sent again unchanged (same ``request``) after a reconnect."""

    kind: ClassVar[str] = "ask"


@dataclass(frozen=True, slots=True)
class CancelRequest:
    kind: ClassVar[str] = "cancel"
    request: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    kind: ClassVar[str] = "beat"


@dataclass(frozen=True, slots=True)
class Healing:
    """Progress of a heal, of a rank (within a group) or of the group (to the lighthouse). The next request ends it."""

    kind: ClassVar[str] = "healing"
    bytes_done: int
    bytes_total: int
    """0: unknown."""
    bytes_per_second: float
    """Over the last seconds; the average once the heal has ended."""
    step: int = 0
    """Step of the state that is loaded."""
    source: Sentence = ""
    """replica_id of the source; empty: unknown."""
    via: Sentence = ""
    """``CheckpointTransport.via``."""
    seconds: float = 0.0
    """Time since the heal began."""
    ended: bool = False
    error: Sentence = ""
    """Reason of the failure; empty: the heal has not failed."""

    @property
    def seconds_left(self) -> float | None:
        """Estimate at the current rate; None: unknown."""
        if not self.bytes_total or self.bytes_per_second < 1:
            return None
        return max(0, self.bytes_total - self.bytes_done) / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Exposure:
    """A keeper that has no copies of a member, so that the loss of the member loses its shards."""

    keeper: str
    """replica_id; empty: the member has no keeper."""
    reason: Sentence


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The shards of a group whose model exists once, of a rank (within a group) or of the group. It replaces the last.

    Sent after each recovery, when keepers or exposure change, and every few seconds.
    """

    kind: ClassVar[str] = "shards"
    world: int
    """quorum_id in which its ranks took their places."""
    seat: int
    """Place of the group among the members."""
    ranks: int
    """Number of ranks of all members."""
    former_ranks: int
    """The same, before the last recovery; 0: the job began."""
    how: str
    """The last recovery: ``fresh`` (the job began), ``unchanged``, ``replaced``, ``resized``, ``resumed`` (from a
    checkpoint), ``lost`` (shards are lost, and the group ends)."""
    step: int
    """Step at which the recovery began."""
    seconds: float
    """Duration of the last recovery."""
    copies_bytes: int
    """Size of the copies that the group keeps of others."""
    keepers: tuple[str, ...] = ()
    """replica_ids of the groups that keep copies of this one, or should."""
    exposed: tuple[Exposure, ...] = ()
    went_back: int = 0
    """Committed steps that the last recovery has lost."""
    formed: bool = False
    """The first report since the last recovery."""
    keeps: tuple[str, ...] = ()
    """replica_ids of the groups whose copies this one has: a lighthouse that took over may not hear of them."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Graceful leave, answered with ``Goodbye``. Never sent in the middle of a step."""

    kind: ClassVar[str] = "leave"
    reason: Sentence
    cause: str = ""
    """``finished`` (the script ended), ``failed`` (it ended with an error), ``drained`` (an operator's order),
    ``stopped`` (a signal); empty: unknown."""
    step: int | None = None
    """Steps that the group has committed; None: unknown."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The group moves to another lighthouse. The group is not lost."""

    kind: ClassVar[str] = "moved"


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole group is lost because one of its ranks died. Sent by rank 0."""

    kind: ClassVar[str] = "failed"
    reason: Sentence


# ---- lighthouse to worker


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Address of a service that registered with the lighthouse."""

    service: str
    """``relay`` or ``metrics``."""
    name: str
    address: str
    """``http://host:port``."""


@dataclass(frozen=True, slots=True)
class Welcome:
    kind: ClassVar[str] = "welcome"
    version: int
    epoch: int
    quorum_id: int
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    reconnect_grace_ms: int
    """For operators who read the wire; no worker uses it."""
    lighthouse: str = ""
    """Name of the lighthouse, for logs."""
    services: tuple[ServiceAddress, ...] = ()
    """Sorted by service and name."""
    heal_timeout_ms: int = 0
    """Time that the next quorum waits for a group that heals; 0: unknown."""
    live_step: int = 0
    """Highest step of the other connected groups that have trained since the job began or resumed; 0: none, or
    unknown."""
    durable_relays: tuple[str, ...] = ()
    """Names of the relays that committed the newest durable checkpoint of the job; empty: none is known."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The job's policy changed: these values replace those of ``Welcome``. Also sent within a group."""

    kind: ClassVar[str] = "timing"
    heartbeat_interval_ms: int
    """0: the worker keeps its own."""
    heartbeat_timeout_ms: int
    reconnect_grace_ms: int
    """For operators who read the wire; no worker uses it."""
    heal_timeout_ms: int = 0


@dataclass(frozen=True, slots=True)
class Services:
    """All services known to the lighthouse; replaces the previous list. Also sent within a group."""

    kind: ClassVar[str] = "services"
    services: tuple[ServiceAddress, ...]


@dataclass(frozen=True, slots=True)
class Quorum:
    """The quorum of the next step, as the lighthouse answers a request, and as a client holds it.

    While the members do not change, they are all at one (step, lineage): the answer is ``uniform`` and without a list,
    and ``listed`` of a client is the same tuple in every round. So a round costs O(1) for any number of members.
    """

    kind: ClassVar[str] = "quorum"
    request: int
    epoch: int
    quorum_id: int
    created_ms: int
    """Unix time at which this quorum_id was formed."""
    version: int
    """Number of the member list within the epoch; grows when anything in it changes except a common step and lineage.
    """
    step: int
    lineage: Lineage
    """Of the reference state; if ``uniform``, of every member."""
    joiners: int
    """Connected groups that are not in this quorum."""
    uniform: bool
    """All members are at (step, lineage), without commit failure and shrink_only. These values, and the batches, are
    outdated in ``listed``."""
    listed: tuple[Member, ...]
    """The members as last sent, sorted by replica_id. Left out (empty) on the wire if ``uniform``: the list is the last
    one sent on this session."""
    verify: bool = False
    """Members with the reference state must send its root digest with their next request."""
    allow_heal: bool = True
    """False: a member forbids healing, so every member takes part with the state it has. True if ``finishing``."""
    went_back_from: int = 0
    """Step that the job had reached, if this quorum begins at an earlier one; else 0."""
    finishing: bool = False
    """A member asked with ``final``: members that are behind heal, and no member reduces or commits anything."""
    differ: Sentence = ""
    """A comparison found that the weights of groups differ: which groups, at which step, and what follows; a sentence
    for the logs of the trainers. Empty: no comparison ended with this quorum, or all weights are equal."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The members with the values of this round. O(members)."""
        if not self.uniform:
            return self.listed
        return tuple([Member(m.replica_id, self.step, self.lineage, 0, False, m.info) for m in self.listed])


@dataclass(frozen=True, slots=True)
class Closed:
    """Answers a request with ``final``: all groups have finished, and this one holds the final state."""

    kind: ClassVar[str] = "closed"
    request: int
    state: FinalState


@dataclass(frozen=True, slots=True)
class Denied:
    """The request failed. ``reason`` is a sentence for logs."""

    kind: ClassVar[str] = "denied"
    request: int
    code: str
    """``deadline``, ``layout``, ``machine``, ``collectives``, ``diverged``, ``start`` or ``retry``; a worker treats any
    other code as a failure of the request."""
    reason: Sentence
    peer_address: str = ""
    """With code ``layout``: a group server with the parameters of the job; empty: ``reason`` names the difference."""
    closed: FinalState | None = None
    """With code ``start``: the job is closed, and this group does not hold its final state. None: it is not closed."""
    peer_step: int = 0
    """Of the group at ``peer_address``, the step that it takes; of one that finishes, the last one."""


@dataclass(frozen=True, slots=True)
class MemberLost:
    kind: ClassVar[str] = "member_lost"
    quorum_id: int
    replica_id: str
    reason: Sentence


@dataclass(frozen=True, slots=True)
class RoundBroken:
    """The answer with this quorum_id did not reach every member: abort the step and request again."""

    kind: ClassVar[str] = "round_broken"
    quorum_id: int
    reason: Sentence


@dataclass(frozen=True, slots=True)
class Drain:
    """Order to finish the step, leave, and exit with 0."""

    kind: ClassVar[str] = "drain"
    reason: Sentence


@dataclass(frozen=True, slots=True)
class Evicted:
    kind: ClassVar[str] = "evicted"
    reason: Sentence
    ban_seconds: float


@dataclass(frozen=True, slots=True)
class NotLeader:
    kind: ClassVar[str] = "not_leader"
    leader: str
    """Address of the leader; empty: no lighthouse leads."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The lighthouse refuses and closes the session."""

    kind: ClassVar[str] = "refused"
    code: str
    """``version_too_old``, ``version_too_new``, ``bad_message``, ``banned``, ``replaced`` or ``not_ready``. Retry only
    for ``not_ready``."""
    reason: Sentence


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Answers ``Leave``: the group is no longer part of the job."""

    kind: ClassVar[str] = "bye"


ToLighthouse = (
    Hello | QuorumRequest | CancelRequest | Heartbeat | Healing | ShardReport | RankStacks | Leave | Moved | Failed
)
ToWorker = (
    Welcome
    | Timing
    | Services
    | Quorum
    | Closed
    | Denied
    | MemberLost
    | RoundBroken
    | Drain
    | Evicted
    | StacksRequest
    | Hung
    | NotLeader
    | Refused
    | Goodbye
)
