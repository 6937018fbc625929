"""One group as the lighthouse knows it: a state, the data of that state, and facts that outlive it.

``State`` says what the group does between two quorums; ``Action`` is everything that may change it. ``TRANSITIONS`` is
this table:

    ========  ======  ========  =======  =============  ==========  =======
    state     ASK     WITHDRAW  ANSWER   HEAL_PROGRESS  HEAL_ENDED  EXCLUDE
    ========  ======  ========  =======  =============  ==========  =======
    WORKING   ASKING  WORKING   -        HEALING        HEALED      WORKING
    ASKING    ASKING  WORKING   WORKING  ASKING         ASKING      ASKING
    HEALING   ASKING  HEALING   -        HEALING        HEALED      WORKING
    HEALED    ASKING  HEALED    -        HEALED         HEALED      WORKING
    ========  ======  ========  =======  =============  ==========  =======

``-`` raises ``IllegalTransitionError``: the caller answered a group that does not ask. Reports of a heal do not change
a group that asks or whose heal has ended.

Three facts are independent of the state: whether the group is a member of the current quorum (``member``), whether its
connection is open (``session``; a group without one never asks), and whether it is excluded (``excluded``; an excluded
group never heals, and its open request does not count).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from keepstep_lighthouse.quorum.events import Announce
from keepstep_mesh.protocol.lineage import is_committed, is_following, origin
from keepstep_mesh.protocol.membership import Lineage, MemberInfo, StepReport
from keepstep_mesh.protocol.messages import Healing, QuorumRequest, ShardReport


class State(IntEnum):
    WORKING = 0
    """No open request, no heal: the group trains under its last answer, or has not asked yet."""
    ASKING = 1
    """Waits for the next quorum; ``Group.request`` is open since ``Group.asked_at``."""
    HEALING = 2
    """Receives the state of another group; ``Group.heal`` has the progress."""
    HEALED = 3
    """The heal has ended, with or without an error; ``Group.heal`` has the last report."""


class Action(IntEnum):
    ASK = 0
    """A quorum request arrived."""
    WITHDRAW = 1
    """The request was cancelled, denied, or lost with its connection."""
    ANSWER = 2
    """The group is in the quorum that was announced."""
    HEAL_PROGRESS = 3
    HEAL_ENDED = 4
    EXCLUDE = 5
    """The group no longer counts, see ``Exclusion``."""


WORKING, ASKING, HEALING, HEALED = State
ASK, WITHDRAW, ANSWER, HEAL_PROGRESS, HEAL_ENDED, EXCLUDE = Action  # an attribute of an enum takes three times as long

TRANSITIONS: tuple[tuple[State | None, ...], ...] = (
    (ASKING, WORKING, None, HEALING, HEALED, WORKING),
    (ASKING, WORKING, WORKING, ASKING, ASKING, ASKING),
    (ASKING, HEALING, None, HEALING, HEALED, WORKING),
    (ASKING, HEALED, None, HEALED, HEALED, WORKING),
)
"""``TRANSITIONS[state][action]``: the next state; None: illegal."""


class IllegalTransitionError(Exception):
    """A defect of the state machine: an action that the table does not allow."""


class Exclusion(Enum):
    """Why a healthy group does not count."""

    DUPLICATE_NAME = "duplicate_name"
    """Another incarnation of its name is healthy."""
    LAYOUT = "layout"
    """Its layout or its settings differ from those of the job."""
    PARTED = "parted"
    """It is on probation (``probation``)."""
    SPARE = "spare"
    """It stands by (``spares``)."""


@dataclass(frozen=True, slots=True)
class Excluded:
    reason: Exclusion
    sentence: str = ""
    """The difference, for ``LAYOUT``; the cause, for ``PARTED``."""
    until: float = 0.0
    """When it ends, for ``PARTED``; monotonic seconds."""


class Answer(NamedTuple):
    """The last answer to a group. A named tuple, because each group gets one in each round."""

    announce: Announce
    request: int
    """Number of the request that was answered."""
    session: int | None
    """Session that the answer was sent to."""


class Port(NamedTuple):
    """Port on which the group listens."""

    session: int
    """Session in which the group told it."""
    number: int
    answered: bool = False
    """The group answered there to this lighthouse, during that session."""


@dataclass(frozen=True, slots=True)
class Heal:
    """Data of ``State.HEALING`` and ``State.HEALED``."""

    progress: Healing
    """The last report."""
    began: float
    failed_tries: int
    """Heals of this name that failed in a row before this one."""


@dataclass(slots=True, eq=False)
class Group:
    """One incarnation. Only ``Groups`` and ``OpenHeals`` change session, member, excluded, heal, and the state."""

    replica_id: str
    name: str
    arrived: int
    """Ordinal of its hello: lower is older."""
    member: bool
    """Of the current quorum."""

    # ---- presence
    session: int | None = None
    """None: its connection ended at ``closed_at`` and may be opened again."""
    heard_at: float = 0.0
    closed_at: float = 0.0
    host: str = ""
    """Address from which it connected; empty: unknown."""
    local: bool = False
    """As in ``Opened``."""
    port: Port | None = None
    """None: unknown."""
    draining: str | None = None
    """Reason of the drain."""
    drained_by: str = ""
    """Sender of that order."""
    told_to_leave: bool = False
    """Whether its order to drain was sent: it waits if shards would be lost with this group."""

    # ---- between two quorums
    state: State = State.WORKING
    request: QuorumRequest | None = None
    """The open one."""
    asked_at: float = 0.0
    highest_request: int = -1
    answer: Answer | None = None
    working_since: float | None = None
    """When it was answered; None: it has asked since."""
    heal: Heal | None = None
    heal_given_up: bool = False
    """A quorum was formed without waiting for its heal. Reset by its next request."""
    excluded: Excluded | None = None

    # ---- its state and its steps
    step: int = 0
    lineage: Lineage = ""
    live_step: int = 0
    """Its step, if it is connected and has live weights, from which others could heal; else 0."""
    step_seconds: float | None = None
    """From its last answer to its next request."""
    committed: int = 0
    """Steps, each from an answer of this lighthouse to the next request."""
    trained: bool = False
    """It has asked with a state that was committed. A group that only follows commits steps without one."""
    committed_at: float | None = None
    """When it asked after the last of these steps; None: no step yet."""

    shards: ShardReport | None = None
    """Its last report, of a job whose model exists once."""

    # ---- agreement
    info: MemberInfo = field(default_factory=MemberInfo)
    settings: str = ""
    """As in its request; empty: unknown."""
    groups: int = 0
    """Number of groups of the job, as in its hello; 0: unknown."""
    size: int = 0
    """The same, once its request fits the others."""
    last_step: StepReport | None = None
    """Its last report of a step."""

    # ---- verification
    diverged: bool = False
    """Its weights differ from those of the other groups, and it still stands at that state."""

    # ---- spares
    stands_by: bool = False
    """It has not been let in since it came as a spare."""
    came_as_spare: bool = False

    # ---- finishing
    held_back_at: tuple[int, Lineage] | None = None
    """Step and lineage at which it asked to train while other groups had finished there."""
    told_closed: bool = False
    """It got the answer that the job is closed, and has not asked since. Then its script does as it likes."""

    def apply(self, action: Action) -> None:
        """Move to the next state. Data of the state is the caller's task."""
        state = TRANSITIONS[self.state][action]
        if state is None:
            raise IllegalTransitionError(f"{self.replica_id} is {self.state.name} and cannot {action.name}")
        self.state = state

    def is_excluded(self, reason: Exclusion) -> bool:
        return self.excluded is not None and self.excluded.reason is reason

    def holds_newest(self) -> bool:
        """Return whether the group held the state of the last quorum when it last asked, or has taken its step since.

        A sound state, or steps that the group has committed, are no proof: the state may be that of a history which the
        job has left, and a group that joins again, heals, or follows the others has committed earlier. False for a
        group that this lighthouse has not answered: its state is unknown until then.
        """
        if self.answer is None or self.diverged or self.heal is not None or is_following(self.lineage):
            return False
        last = self.answer.announce
        if (self.step, self.lineage) == (last.step, last.lineage):
            return True
        took_step = self.step > last.step and is_committed(self.lineage)
        return took_step and origin(self.lineage).quorum_id == last.quorum_id

    @property
    def heal_progress(self) -> Healing | None:
        """Progress of the heal that is under way."""
        return self.heal.progress if self.state is State.HEALING and self.heal is not None else None

    def validate(self) -> None:
        """Raise AssertionError with a sentence when state and data do not fit."""
        assert (self.state is State.ASKING) == (self.request is not None), "an open request without its state"
        assert (self.state in (State.HEALING, State.HEALED)) == (self.heal is not None), "a heal without its state"
        assert self.heal is None or self.heal.progress.ended == (self.state is State.HEALED), "a heal misses its end"
        assert self.request is None or self.session is not None, "a request outlived its session"
        assert self.heal is None or self.excluded is None, "an excluded group heals"
