"""The log of followed steps, beside a model that keeps every step for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepstep.step.catching_up.gradient_log import (
    TRANSITIONS,
    Action,
    FollowedStep,
    GradientLog,
    HeldState,
    IllegalTransitionError,
    Phase,
)

MEMORY = 100


def step_after(step: int, nbytes: int = 1, participants: int = 1) -> FollowedStep[int]:
    return FollowedStep(step + 1, f"lineage of {step + 1}", participants, 7 * (step + 1), nbytes)


class Following(RuleBasedStateMachine):
    """Weights are the product of what was applied to them; those of the others are never behind."""

    @initialize(step=st.integers(0, 5))
    def start(self, step: int) -> None:
        self.log: GradientLog[int] = GradientLog(MEMORY)
        self.weights = HeldState(step, "own", 3)
        self.applied: list[int] = []
        self.others = 10
        self.base = 0
        self.taken: list[FollowedStep[int]] = []

    @precondition(lambda self: self.log.phase is Phase.IDLE)
    @rule()
    def joins(self) -> None:
        self.base = self.others
        self.log.begin(self.weights, HeldState(self.base, "theirs", 0))
        self.taken = []

    @precondition(lambda self: self.log.phase is not Phase.IDLE)
    @rule(nbytes=st.integers(0, 60), participants=st.integers(1, 3))
    def follows(self, nbytes: int, participants: int) -> None:
        step = step_after(self.others, nbytes, participants)
        self.others += 1
        self.log.keep(step)
        self.taken.append(step)

    @precondition(lambda self: self.log.phase is Phase.RECEIVING and self.taken)
    @rule(batches=st.integers(0, 1000))
    def arrives(self, batches: int) -> None:
        self.log.arrive(batches)
        self.applied, self.weights = [], HeldState(self.base, "theirs", batches)

    @precondition(lambda self: self.log.phase is Phase.REPLAYING)
    @rule()
    def replays(self) -> None:
        step = self.log.next()
        assert step is self.taken[len(self.applied)], "in their order, none twice"
        self.applied.append(step.gradients)
        self.weights = HeldState(step.step, step.lineage, self.weights.batches_committed + step.participants)
        assert self.log.replayed() == self.weights
        if self.log.phase is Phase.IDLE:
            assert self.weights.step == self.others, "it is done when its weights are those of the others"
            assert self.applied == [one.gradients for one in self.taken]

    @precondition(lambda self: self.log.phase is not Phase.IDLE)
    @rule(missed=st.integers(0, 3))
    def misses_steps(self, missed: int) -> None:
        self.others += missed
        if missed:
            with pytest.raises(IllegalTransitionError):
                self.log.keep(step_after(self.others))
        assert self.log.give_up() == self.weights, "the weights are named as what they are"

    @invariant()
    def is_valid(self) -> None:
        self.log.validate()
        kept = self.taken[len(self.applied) if self.log.phase is Phase.REPLAYING else 0 :]
        if self.log.phase is not Phase.IDLE:
            assert self.log.nbytes == sum(one.nbytes for one in kept)
            assert self.log.full == (self.log.nbytes >= MEMORY)
            assert self.log.reached == self.others
            assert not self.log.is_worth_more(HeldState(self.others, 1, 0))
            assert self.log.is_worth_more(HeldState(self.others, "follows:1", 0)), "no weights"
            assert self.log.is_worth_more(HeldState(0, "torn:b", 0))


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def in_phase(phase: Phase) -> GradientLog[int]:
    log: GradientLog[int] = GradientLog(MEMORY)
    if phase is not Phase.IDLE:
        log.begin(HeldState(0, "own", 0), HeldState(4, "theirs", 0))
        log.keep(step_after(4))
    if phase is Phase.REPLAYING:
        log.arrive(0)
    return log


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("action", Action)
def test_the_table_of_transitions_is_what_the_log_does(phase: Phase, action: Action) -> None:
    log = in_phase(phase)
    acts = {
        Action.BEGIN: lambda: log.begin(HeldState(0, "own", 0), HeldState(4, "theirs", 0)),
        Action.KEEP: lambda: log.keep(step_after(5)),
        Action.ARRIVE: lambda: log.arrive(0),
        Action.REPLAY: log.replayed,
        Action.GIVE_UP: log.give_up,
    }
    allowed = TRANSITIONS[phase].get(action)
    if allowed is None:
        with pytest.raises(IllegalTransitionError):
            acts[action]()
        assert log.phase is phase
    else:
        acts[action]()
        assert log.phase in allowed
    log.validate()


def test_weights_of_a_replay_in_doubt_have_a_lineage_of_their_own() -> None:
    log: GradientLog[int] = GradientLog(MEMORY)
    log.begin(HeldState(0, "new:a", 0), HeldState(4, 2, 8), "behind:a:1")
    for step in (4, 5, 6):
        log.keep(step_after(step))
    log.arrive(8)
    assert log.is_worth_more(HeldState(3, 2, 0)), "the state that has arrived is sound"
    assert log.replayed() == HeldState(5, "behind:a:1", 9)
    assert not log.is_worth_more(HeldState(3, 2, 0))
    assert log.give_up() == HeldState(5, "behind:a:1", 9)


def test_a_limit_of_no_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory=0 must be at least 1 byte"):
        GradientLog(0)
