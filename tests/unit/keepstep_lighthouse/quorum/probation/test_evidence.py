"""Evidence about failed steps: what it accuses, what confirms it, and the fewest groups that explain it."""

from __future__ import annotations

import random

import pytest

from keepstep_lighthouse.quorum.events import LogEntry
from keepstep_lighthouse.quorum.groups.group import Exclusion
from keepstep_lighthouse.quorum.probation import partings
from keepstep_lighthouse.quorum.probation.evidence import COST_FACTOR, Evidence, accusations, cover
from keepstep_lighthouse.quorum.probation.partings import MAX_PARTED_SECONDS, PARTED_ROUNDS, PARTED_SECONDS, Partings
from keepstep_mesh.protocol.membership import OWN, PEER, UNKNOWN, StepFailure
from tests.support.models.core_driver import Driver

MEMBERS = "abcd"
AB = {frozenset("ab")}


def own() -> StepFailure:
    return StepFailure(1, OWN)


def cut_from(names: str) -> StepFailure:
    return StepFailure(1, PEER, tuple(f"{name}:incarnation" for name in names))


@pytest.mark.parametrize(
    ("failures", "accused"),
    [
        ({"a": own(), "b": StepFailure(1, UNKNOWN)}, {"a"}),
        ({"a": own(), "b": own()}, {"a", "b"}),
        ({"a": own(), "b": own(), "c": own()}, set()),
        ({"a": cut_from("b"), "b": cut_from("a")}, {"ab"}),
        ({"a": cut_from("b")}, {"ab"}),
        ({"a": cut_from("bc"), "b": cut_from("a")}, {"ab"}),
        ({"a": cut_from("bcd")}, {"a"}),
        ({"a": cut_from("bcd"), "b": cut_from("a"), "c": cut_from("a"), "d": cut_from("a")}, {"ab", "ac", "ad"}),
        ({"a": cut_from("axy")}, set()),
        ({"a": StepFailure(1, UNKNOWN, ("b:1",))}, set()),
    ],
)
def test_what_the_failures_of_a_round_accuse(failures: dict[str, StepFailure], accused: set[str]) -> None:
    assert accusations(failures, MEMBERS) == {frozenset(one) for one in accused}


@pytest.mark.parametrize(
    ("accused", "chosen"),
    [
        ({"a"}, "a"),
        ({"ab"}, "b"),
        ({"ab", "ac"}, "a"),
        ({"a", "ab"}, "a"),
        ({"a", "ab", "cd"}, "ad"),
        ({"ax", "ay", "bx", "by", "cx", "cy"}, "xy"),
        (set(), ""),
    ],
)
def test_the_fewest_groups_that_explain_all_accusations(accused: set[str], chosen: str) -> None:
    assert cover({frozenset(one) for one in accused}, rank=str) == set(chosen)


def test_a_second_failure_confirms_an_accusation_in_the_next_round_or_soon_after() -> None:
    evidence = Evidence()
    assert evidence.add(AB, number=1, duration=5.0, now=100.0, trial=()) == set()
    assert evidence.add(AB, number=2, duration=5.0, now=1000.0, trial=()) == AB  # the next round, whenever it ends
    later = Evidence()
    later.add(AB, number=1, duration=5.0, now=100.0, trial=())
    assert later.add(AB, number=9, duration=5.0, now=100.0 + COST_FACTOR * 5.0, trial=()) == AB
    rare = Evidence()
    rare.add(AB, number=1, duration=5.0, now=100.0, trial=())
    assert rare.add(AB, number=9, duration=5.0, now=100.1 + COST_FACTOR * 5.0, trial=()) == set()


def test_against_a_group_on_trial_one_failure_is_enough() -> None:
    assert Evidence().add(AB, number=1, duration=0.1, now=100.0, trial={"b"}) == AB


def test_an_old_confirmation_ends_unless_a_group_on_probation_is_concerned() -> None:
    evidence = Evidence()
    for number in (1, 2):
        evidence.add(AB, number=number, duration=1.0, now=100.0, trial=())
    assert evidence.add(AB, number=50, duration=1.0, now=500.0, trial=()) == set()


def test_each_parting_doubles_the_time_up_to_a_limit() -> None:
    partings = Partings()
    seconds = [partings.part("a", "own", "", 0.01, 100.0).until - 100.0 for _ in range(10)]
    assert seconds[:3] == [PARTED_SECONDS, 2 * PARTED_SECONDS, 4 * PARTED_SECONDS]
    assert seconds[-1] == MAX_PARTED_SECONDS
    assert partings.part("b", "cut", "", 6.0, 100.0).until - 100.0 == PARTED_ROUNDS * 6.0


def test_names_that_never_return_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partings, "MAX_REMEMBERED", 3)
    kept = Partings()
    for number in range(9):
        kept.part(f"r{number}", "own", "", 0.0, 0.0).out = number == 0
        kept.heal_failed(f"r{number}")
    assert len(kept.groups) <= 4
    assert kept.is_out("r0")
    assert len(kept.failed_heals) == 3


@pytest.mark.parametrize("seed", range(3))
def test_a_liar_never_keeps_more_than_one_other_group_out(seed: int) -> None:
    """Its steps fail as it likes, and it says what it likes; a round without it commits."""
    draw, driver = random.Random(seed), Driver(min_replicas=1)
    names = ["r0", "r1", "r2", "r3", "r4"]
    liar = draw.choice(names)
    driver.start(*names)
    step, worst, partings = 1, 0, 0
    for _ in range(60):
        asking = {one.replica_id for one in driver.core.replicas(driver.now) if one.state.value == "asking"}
        out = {one.replica_id for one in driver.core._groups if one.is_excluded(Exclusion.PARTED)}
        worst = max(worst, len(out - {liar}))
        members = set(driver.record.members)
        lies = liar in members and draw.random() < 0.8
        quorum_id = driver.record.quorum_id
        others = draw.sample([one for one in names if one != liar], draw.randint(1, 4))
        claim = StepFailure(quorum_id, PEER, tuple(others))
        step += not lies
        for name in names:
            if name in asking:
                continue
            failure = claim if name == liar else StepFailure(quorum_id, UNKNOWN)
            lineage = driver.core.record.quorum_id
            driver.asks(name, step, lineage, failures=int(lies), failure=failure if lies else None)
        driver.passes(draw.choice((0.1, 1.0, 6.0)))
        assert len(driver.record.members) >= 3
    partings = sum(isinstance(one, LogEntry) and one.kind == "parted" for one in driver.log)
    assert worst <= 1
    assert partings
