"""The order of states, over every short history: see ``lineage_model``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from keepstep.group import quorum_plan
from keepstep_mesh.protocol.lineage import State, origin, soundness
from keepstep_mesh.protocol.membership import Lineage
from tests.support.models.lineage_model import Model, _plan


@pytest.mark.parametrize(
    ("settings", "depth", "common_steps"),
    [
        ({}, 4, 3),
        ({"names": "abc"}, 3, 3),
        ({"init_sync": False}, 4, 2),
        ({"lineages": False}, 4, 3),
        ({"in_process": True}, 4, 2),
        ({"broken": True}, 4, 2),
        ({"behind": True}, 4, 1),
        ({"behind": True, "names": "abc"}, 2, 1),
        ({"behind": True, "init_sync": False, "in_process": True}, 3, 1),
    ],
    ids=str,
)
def test_no_short_history_breaks_a_rule(settings: dict[str, Any], depth: int, common_steps: int) -> None:
    model = Model(**settings)
    assert model.explore(depth, common_steps) is None
    assert model.worlds > 1000, "else it did not look"


Order = Callable[[State], tuple[int, ...]]


@pytest.fixture
def another_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Order], None]]:
    """Has all groups go by it."""

    def use(order: Order) -> None:
        def reference(members: Sequence[State]) -> tuple[int, Lineage]:
            weight = Counter((one.step, one.lineage) for one in members)
            best = max(members, key=lambda one: (*order(one), weight[one.step, one.lineage]))
            return best.step, best.lineage

        monkeypatch.setattr(quorum_plan, "reference_state", reference)
        _plan.cache_clear()

    yield use
    _plan.cache_clear()


def quorum_of(state: State) -> int:
    return origin(state.lineage).quorum_id


def sound(state: State) -> int:
    return soundness(state.step, state.lineage)


def test_by_the_highest_step_a_zombie_undoes_a_resume_from_an_older_checkpoint(
    another_order: Callable[[Order], None],
) -> None:
    another_order(lambda one: (sound(one), one.step, quorum_of(one)))
    violation = Model().explore(3, 3)
    assert violation is not None
    assert violation.rule == "resume"
    assert violation.story == (
        "a:4 loads step 1 of 1",
        "quorum 2 of ['a:4'], ['a:4'] commit",
        "quorum 3 of ['a:4', 'b:0'], ['a:4'] commit",
    )


def test_by_the_highest_quorum_a_group_that_starts_from_nothing_undoes_the_training(
    another_order: Callable[[Order], None],
) -> None:
    another_order(lambda one: (sound(one), quorum_of(one), one.step))
    violation = Model().explore(3, 3)
    assert violation is not None
    assert violation.rule == "progress"
    assert violation.story == (
        "a:4 starts",
        "quorum 2 of ['a:4'], ['a:4'] commit",
        "quorum 3 of ['a:4', 'b:0'], ['a:4'] commit",
    )


def test_without_soundness_groups_heal_from_one_that_is_behind_or_broken(
    another_order: Callable[[Order], None],
) -> None:
    another_order(lambda one: (origin(one.lineage).resumed, one.step, quorum_of(one)))
    for settings in ({"behind": True}, {"broken": True}):
        violation = Model(**settings).explore(4)
        assert violation is not None
        assert violation.rule == "sound"
