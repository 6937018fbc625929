"""The log of a group that catches up: the averaged gradients of the steps that it has followed without weights. Pure.

The group takes part in the step that begins at its *base*, contributes zeros, and keeps the averaged gradients of this
step and of all later ones, while the state of the base arrives in the background. Then it *replays* the steps: the same
optimizer steps as the others have taken, on the same numbers. When no step is left, its weights are theirs.

``Phase`` says what the group does, ``Action`` is everything that may change it. ``TRANSITIONS`` is this table:

    =========  =========  =========  =========  ================  ========
    phase      BEGIN      KEEP       ARRIVE     REPLAY            GIVE_UP
    =========  =========  =========  =========  ================  ========
    IDLE       RECEIVING  -          -          -                 -
    RECEIVING  -          RECEIVING  REPLAYING  -                 IDLE
    REPLAYING  -          REPLAYING  -          REPLAYING, IDLE   IDLE
    =========  =========  =========  =========  ================  ========

``-`` raises ``IllegalTransitionError``. REPLAY of the last step that was kept leads to IDLE.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from keepstep_mesh.protocol.lineage import State, is_following, worth
from keepstep_mesh.protocol.membership import Lineage

T = TypeVar("T")


class Phase(Enum):
    IDLE = "idle"
    """The weights are those of the group's progress."""
    RECEIVING = "receiving"
    """The state of the base is on its way; the weights are those from before."""
    REPLAYING = "replaying"
    """The state of the base is loaded; some steps are left."""


class Action(Enum):
    BEGIN = "begin"
    KEEP = "keep"
    ARRIVE = "arrive"
    REPLAY = "replay"
    GIVE_UP = "give_up"


TRANSITIONS: dict[Phase, dict[Action, frozenset[Phase]]] = {
    Phase.IDLE: {Action.BEGIN: frozenset({Phase.RECEIVING})},
    Phase.RECEIVING: {
        Action.KEEP: frozenset({Phase.RECEIVING}),
        Action.ARRIVE: frozenset({Phase.REPLAYING}),
        Action.GIVE_UP: frozenset({Phase.IDLE}),
    },
    Phase.REPLAYING: {
        Action.KEEP: frozenset({Phase.REPLAYING}),
        Action.REPLAY: frozenset({Phase.REPLAYING, Phase.IDLE}),
        Action.GIVE_UP: frozenset({Phase.IDLE}),
    },
}
"""The phases that may follow, by phase and action."""


class IllegalTransitionError(Exception):
    """A defect of the caller: an action that the table does not allow, or a step out of order."""


class HeldState(NamedTuple):
    """Identity of weights."""

    step: int
    """Number of committed steps."""
    lineage: Lineage
    batches_committed: int


@dataclass(frozen=True, slots=True)
class FollowedStep(Generic[T]):
    """One step that the others have taken."""

    step: int
    """Number of committed steps after it."""
    lineage: Lineage
    """Of the weights after it."""
    participants: int
    """Number of groups whose gradients were averaged."""
    gradients: T
    nbytes: int
    """Memory of ``gradients``."""


class GradientLog(Generic[T]):
    """The steps that one rank has followed and not replayed.

    Args:
        memory: limit of the kept gradients in bytes. ``full`` tells when it is reached; the log itself takes more, so
            that no step is missing.
    """

    def __init__(self, memory: int) -> None:
        if memory < 1:
            raise ValueError(f"memory={memory} must be at least 1 byte")
        self.phase = Phase.IDLE
        self.memory = memory
        self.nbytes = 0
        """Memory of the kept gradients."""
        self._steps: deque[FollowedStep[T]] = deque()
        self._held: HeldState | None = None
        self._base: HeldState | None = None
        self._doubted: Lineage | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def is_worth_more(self, reference: State) -> bool:
        """Return whether the weights are worth more than the state that the groups of a quorum go on from.

        The groups that this one followed are gone then. If it took part, the job would lose the steps of its weights.
        """
        held = self._held
        return held is not None and (is_following(reference.lineage) or worth(held) > worth(reference))

    @property
    def full(self) -> bool:
        """Whether the kept gradients have reached the limit."""
        return self.nbytes >= self.memory

    @property
    def base(self) -> HeldState:
        """The state that the group follows from."""
        if self._base is None:
            raise IllegalTransitionError("the group follows no step")
        return self._base

    @property
    def reached(self) -> int:
        """Number of committed steps after the last step that the group has followed."""
        if self._steps:
            return self._steps[-1].step
        held, base = self._held, self._base
        if held is None or base is None:
            raise IllegalTransitionError("the group follows no step")
        return held.step if self.phase is Phase.REPLAYING else base.step

    def begin(self, held: HeldState, base: HeldState, doubted: Lineage | None = None) -> None:
        """Follow from ``base`` on.

        Args:
            held: the state that the weights have until that of ``base`` is loaded.
            base: the state that arrives.
            doubted: lineage of the weights after a replay, if they may differ from those of the others. None: they do
                not.
        """
        self._move(Action.BEGIN, Phase.RECEIVING)
        self._held, self._base, self._doubted = held, base, doubted

    def keep(self, step: FollowedStep[T]) -> None:
        """Keep a step that the others have committed. It must be the one after the last."""
        if self.phase is not Phase.IDLE and step.step != self.reached + 1:
            raise IllegalTransitionError(f"step {step.step} follows step {self.reached}")
        self._move(Action.KEEP, self.phase)
        self._steps.append(step)
        self.nbytes += step.nbytes

    def arrive(self, batches_committed: int) -> None:
        """The state of the base is loaded. ``batches_committed``: of that state."""
        base = self.base if self.phase is Phase.RECEIVING else HeldState(0, "", 0)
        self._move(Action.ARRIVE, Phase.REPLAYING)
        self._held = self._base = base._replace(batches_committed=batches_committed)

    def next(self) -> FollowedStep[T]:
        """Return the step to replay next."""
        if self.phase is not Phase.REPLAYING or not self._steps:
            raise IllegalTransitionError(f"no step to replay: {self.phase.value}, {len(self._steps)} kept")
        return self._steps[0]

    def replayed(self) -> HeldState:
        """Drop the step that ``next`` returned, after its optimizer step. Return the state of the weights now."""
        step, held = self.next(), self._held
        if held is None:
            raise IllegalTransitionError("a step was replayed on no state")
        self._move(Action.REPLAY, Phase.IDLE if len(self._steps) == 1 else Phase.REPLAYING)
        self._steps.popleft()
        self.nbytes -= step.nbytes
        lineage = step.lineage if self._doubted is None else self._doubted
        state = HeldState(step.step, lineage, held.batches_committed + step.participants)
        self._held = state if self._steps else None
        if not self._steps:
            self._base = None
        return state

    def give_up(self) -> HeldState:
        """Drop all steps. Return the state of the weights: a sound one, which may be older than the others'."""
        self._move(Action.GIVE_UP, Phase.IDLE)
        held = self._held
        if held is None:
            raise IllegalTransitionError("a group follows without a state before")
        self._steps.clear()
        self.nbytes, self._held, self._base = 0, None, None
        return held

    def _move(self, action: Action, to: Phase) -> None:
        if to not in TRANSITIONS[self.phase].get(action, frozenset()):
            raise IllegalTransitionError(f"{action.value} in phase {self.phase.value}")
        self.phase = to

    def validate(self) -> None:
        """Raise AssertionError with a sentence when an invariant is violated."""
        follows = self.phase is not Phase.IDLE
        assert (self._held is not None) == follows, "weights without a name"
        assert (self._base is not None) == follows, "a base without its phase"
        assert follows or not self._steps, "an idle group keeps gradients"
        assert self.nbytes == sum(step.nbytes for step in self._steps), "kept bytes are miscounted"
        assert self.phase is not Phase.REPLAYING or self._steps, "nothing is left to replay"
        steps = [step.step for step in self._steps]
        assert not steps or steps == list(range(steps[0], steps[-1] + 1)), "a step is missing"
        if steps and self._held is not None and self._base is not None:
            weights = self._held if self.phase is Phase.REPLAYING else self._base
            assert steps[0] == weights.step + 1, "the first kept step does not follow the weights"
