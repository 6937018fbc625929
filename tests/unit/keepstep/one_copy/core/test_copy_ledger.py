from __future__ import annotations

import pytest

from keepstep.one_copy.core.copy_ledger import CopyLedger, cut, steps_of_round
from keepstep.one_copy.core.holding import State


def at(step: int, quorum_id: int = 1) -> State:
    return State(step, quorum_id)


def filled(step: int = 0, slices: int = 2) -> CopyLedger:
    ledger = CopyLedger(1, 0, slices)
    for number in range(slices):
        ledger.add_base(number, at(step))
    ledger.end_step(at(step))
    return ledger


def take_step(ledger: CopyLedger, state: State, base: int | None = None) -> None:
    if base is not None:
        ledger.add_base(base, at(state.step - 1))
    for number in range(2):
        ledger.add_gradients(number, state)
    ledger.end_step(state)


def test_a_copy_has_at_most_the_memory_that_is_allowed() -> None:
    assert steps_of_round(120, 40, 10, 12) == 5, "Adam: the parameter and two moments"
    assert steps_of_round(120, 40, 5, 24) == 4
    assert steps_of_round(120, 40, 1, 120) == 1, "a slice is replaced as a whole"
    assert steps_of_round(40, 40, 10, 4) == 1, "SGD without momentum"
    assert steps_of_round(100, 0, 10, 10) == 1, "nothing is trained"
    assert steps_of_round(1000, 1, 10, 100) == 10


@pytest.mark.parametrize("sizes", [[1], [5, 1, 1, 1], [1, 1, 1, 5], [0, 0], [3] * 10, [0, 7, 0]])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_slices_are_neighbours_and_together_all(sizes: list[int], count: int) -> None:
    slices = cut(sizes, count)
    assert [index for one in slices for index in one] == list(range(len(sizes)))
    assert all(slices)
    assert len(slices) <= count


def test_slices_have_about_equal_bytes() -> None:
    assert cut([1] * 12, 3) == (tuple(range(4)), tuple(range(4, 8)), tuple(range(8, 12)))


def test_a_copy_without_all_bases_rebuilds_nothing() -> None:
    ledger = CopyLedger(1, 0, 2)
    ledger.add_base(0, at(0))
    ledger.end_step(at(0))
    assert (ledger.complete, ledger.states()) == (False, ())


def test_a_state_can_be_rebuilt_once_its_end_is_there() -> None:
    ledger = filled()
    ledger.add_gradients(0, at(1))
    ledger.add_gradients(1, at(1))
    assert ledger.states() == (at(0),)
    ledger.end_step(at(1))
    assert ledger.states() == (at(0), at(1))
    assert ledger.copy().committed == at(0)


def test_bases_of_different_steps_lead_to_one_state() -> None:
    ledger = filled()
    take_step(ledger, at(1))
    take_step(ledger, at(2), base=0)
    assert ledger.steps_to(0, at(2)) == (at(1), [at(2)])
    assert ledger.steps_to(1, at(2)) == (at(0), [at(1), at(2)])
    assert ledger.states() == (at(1), at(2))


def test_a_base_replaces_the_steps_before_it() -> None:
    ledger = filled()
    take_step(ledger, at(1))
    take_step(ledger, at(2))
    assert ledger.add_base(1, at(2)) == [at(1), at(2)]
    assert ledger.states() == (at(2),), "no other state has the new base"


def test_ends_are_kept_from_the_oldest_base_on() -> None:
    """A replay of the slice with the oldest base needs the options of each step since."""
    ledger = filled()
    take_step(ledger, at(1))
    take_step(ledger, at(2), base=0)
    ledger.add_base(0, at(2))
    assert ledger.end_step(at(3)) == []
    ledger.add_base(1, at(3))
    assert ledger.end_step(at(4)) == [at(0), at(1)]


def test_gradients_of_another_attempt_replace_those_that_were_dropped() -> None:
    ledger = filled()
    take_step(ledger, at(1))
    assert ledger.add_gradients(0, at(1, 2)) == [at(1)]
    assert ledger.states() == (at(0),), "its slices are of two attempts"
    assert ledger.add_gradients(1, at(1, 2)) == [at(1)]
    assert ledger.end_step(at(1, 2)) == [at(1)]
    assert ledger.states() == (at(0), at(1, 2))


def test_a_gap_in_the_log_leads_nowhere() -> None:
    ledger = filled()
    take_step(ledger, at(2))
    assert ledger.states() == (at(0),)
