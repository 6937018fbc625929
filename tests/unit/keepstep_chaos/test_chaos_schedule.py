"""The schedule of `keepstep chaos`: it follows from the seed, and never takes more away than is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest

from keepstep_chaos.recovery import Recovery
from keepstep_chaos.schedule import LOOKAHEAD, Limits, Schedule
from keepstep_chaos.vocabulary import KINDS, Fault, Role, Target

GROUPS = [Target(Role.GROUP, f"r{number}") for number in range(4)]
LIGHTHOUSES = [Target(Role.LIGHTHOUSE, f"l{number}") for number in range(2)]
OTHERS = [Target(Role.RELAY, "relay"), Target(Role.STORE, "etcd"), Target(Role.JOB, "digits")]
TARGETS = [*GROUPS, *LIGHTHOUSES, *OTHERS]


def all_kinds(targets: list[Target]) -> dict[Target, list[str]]:
    return {target: [name for name, kind in KINDS.items() if target.role in kind.roles] for target in targets}


def schedule(seed: int, limits: Limits, targets: list[Target] = TARGETS) -> Schedule:
    return Schedule(seed, targets, all_kinds(targets), limits)


def played(seed: int, limits: Limits, seconds: float = 600.0) -> Iterator[tuple[Fault, set[Target]]]:
    """Yield each fault, and the targets that are down once it has begun, of a job that recovers at random."""
    chance, plan = Random(-seed), schedule(seed, limits)
    back: dict[Target, float] = {}
    for tick in range(int(seconds * 10)):
        now = tick / 10
        back = {target: at for target, at in back.items() if at > now}
        fault = plan.next(now, back)
        if fault is not None:
            if fault.kind.takes_away:
                back[fault.target] = now + fault.seconds + chance.uniform(0.0, 20.0)
            yield fault, set(back)


@pytest.mark.parametrize("seed", range(20))
def test_the_limits_hold_at_any_time(seed):
    limits = Limits(at_most=3, min_groups=2, mean_seconds_between=0.5)
    faults = 0
    for fault, down in played(seed, limits):
        faults += 1
        up = [target.role for target in TARGETS if target not in down]
        assert len(down) <= 3
        assert up.count(Role.GROUP) >= 2, fault
        assert up.count(Role.LIGHTHOUSE) >= 1, fault
        assert up.count(Role.STORE) == 1 or up.count(Role.LIGHTHOUSE) == 2, fault
    assert faults > 100


def test_no_more_groups_are_down_than_a_model_that_exists_once_has_copies():
    faults = list(played(1, Limits(at_most=9, groups_down=1, mean_seconds_between=0.5)))
    assert all(sum(target.role == Role.GROUP for target in down) <= 1 for _, down in faults)
    assert any(fault.target.role == Role.GROUP and fault.kind.takes_away for fault, _ in faults)


def test_limits_are_exceeded_only_when_that_is_asked_for():
    asked = Limits(at_most=9, min_groups=4, beyond_limits=True, mean_seconds_between=0.5)
    assert any(not {*LIGHTHOUSES} - down for _, down in played(1, asked))
    assert any(not {*GROUPS} - down for _, down in played(1, asked))


def test_equal_seeds_give_equal_faults_and_other_seeds_others():
    limits = Limits(mean_seconds_between=1.0)
    first, again, other = ([str(fault) for fault, _ in played(seed, limits)] for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert schedule(5, limits).preview(50) == schedule(5, limits).preview(50)


def test_each_fault_of_the_seed_comes_and_none_is_overtaken_for_ever():
    """The job recovers at once, so only the order of a burst may differ."""
    plan = schedule(3, Limits(at_most=2))
    drawn = [fault.number for fault in plan.preview(200)]
    taken = [fault.number for tick in range(2000) if (fault := plan.next(tick / 10, ())) is not None]
    assert drawn == taken[:200]


def test_a_fault_that_the_job_cannot_bear_waits_for_its_turn():
    plan = schedule(1, Limits(at_most=1, mean_seconds_between=0.01))
    first = plan.next(0.0, ())
    assert first is not None
    later = [plan.next(100.0 * turn, {GROUPS[0]}) for turn in range(1, 50)]
    assert not [fault for fault in later if fault is not None and fault.kind.takes_away]
    waited = plan.next(10_000.0, ())
    assert waited is not None
    assert waited.number <= LOOKAHEAD


def test_the_next_fault_waits_for_the_recovery_or_for_the_pause():
    plan = schedule(1, Limits(mean_seconds_between=1000.0))
    first = plan.next(0.0, ())
    assert first is not None
    assert plan.next(5.0, {first.target}) is None
    assert plan.next(5.1, ()) is not None


def test_faults_with_a_mean_time_between_failures_come_at_random_and_not_earlier():
    plan = schedule(1, Limits(mean_seconds_between=60.0, whole_pauses=True))
    begins = [second for second in range(60_000) if plan.next(float(second), ()) is not None]
    assert 800 < len(begins) < 1200
    assert begins[0] > 0, "the first one waits too"
    gaps = [after - before for before, after in pairwise(begins)]
    assert 0.2 < sum(gap > 83 for gap in gaps) / len(gaps) < 0.3, "of an exponential distribution, a quarter"


def test_a_job_that_bears_no_fault_is_refused():
    alone = [GROUPS[0], LIGHTHOUSES[0]]
    kinds = {target: ["kill"] for target in alone}
    with pytest.raises(ValueError, match="no fault is possible within the limits"):
        Schedule(1, alone, kinds, Limits(min_groups=1))
    assert Schedule(1, alone, kinds, Limits(beyond_limits=True)).next(0.0, ()) is not None


@pytest.mark.parametrize("seed", range(5))
def test_durations_are_within_their_range(seed):
    faults = schedule(seed, Limits(longest_seconds=3.0)).preview(500)
    lasting = [fault.seconds for fault in faults if fault.kind.lasts]
    assert 0.1 <= min(lasting) < 0.2
    assert 2.5 < max(lasting) <= 3.0
    assert {fault.seconds for fault in faults if not fault.kind.lasts} == {0.0}


# ---- what a fault cost


def recovery() -> Recovery:
    return Recovery(TARGETS, 2, began=0.0)


def fault(kind: str, target: Target, number: int = 1) -> Fault:
    return Fault(number, KINDS[kind], target, 1.0)


def test_a_group_is_down_until_it_commits_after_the_fault():
    one = recovery()
    frozen = fault("freeze", GROUPS[0])
    cost = one.begin(frozen, 10.0)
    one.committed(GROUPS[0], 7, 9.9)  # written before, read later
    one.committed(GROUPS[1], 8, 10.5)
    one.end(frozen, 11.0)
    one.committed(GROUPS[0], 8, 10.6)
    assert one.down == {GROUPS[0]}
    one.committed(GROUPS[0], 9, 11.5)
    assert not one.down
    assert (cost.next_commit_seconds, cost.recovered_seconds) == (0.5, 1.5)
    assert one.commits == 3


def test_the_commit_gap_of_a_fault_ends_with_the_first_commit_after_its_recovery():
    one = recovery()
    one.committed(GROUPS[1], 1, 9.0)
    killed = fault("kill", GROUPS[0])
    cost = one.begin(killed, 10.0)
    assert one.stuck(900.0, 60.0) == []
    one.end(killed, 10.1)
    assert one.stuck(60.0, 60.0) == []
    assert one.stuck(71.0, 60.0) == [GROUPS[0]]
    one.detected(GROUPS[1], 10.2)
    one.detected(GROUPS[0], 10.4)
    one.detected(GROUPS[0], 10.9)
    one.committed(GROUPS[1], 2, 10.05)  # the step was nearly done
    one.committed(GROUPS[1], 3, 13.05)
    one.committed(GROUPS[0], 4, 14.0)
    assert cost.commit_gap_seconds == pytest.approx(3.0)
    assert cost.detected_seconds == pytest.approx(0.4)
    one.committed(GROUPS[1], 5, 20.0)
    one.committed(GROUPS[1], 6, 90.0)
    assert cost.commit_gap_seconds == pytest.approx(6.0)


def test_only_a_group_that_no_fault_hit_is_a_false_eviction():
    one = recovery()
    killed = fault("kill", GROUPS[0])
    cost = one.begin(killed, 1.0)
    one.end(killed, 1.0)
    one.lost(GROUPS[0], "lost")
    assert not cost.lost
    one.lost(GROUPS[1], "lost")
    assert cost.lost == ["r1: lost"]


def test_a_fault_that_could_not_be_injected_leaves_nothing_down():
    one = recovery()
    refused = fault("evict", GROUPS[0])
    cost = one.begin(refused, 1.0)
    one.end(refused, 2.0, "no such group")
    assert not one.down
    assert cost.failed == "no such group"


def test_the_watchdog_counts_only_while_enough_targets_are_able():
    one = recovery()
    assert one.wedged_seconds(30.0, TARGETS) == 30.0
    one.committed(GROUPS[0], 1, 40.0)
    assert one.wedged_seconds(50.0, TARGETS) == 10.0
    assert one.wedged_seconds(60.0, [*GROUPS[:1], *LIGHTHOUSES, *OTHERS]) == 0.0  # one group, of two
    assert one.wedged_seconds(65.0, TARGETS) == 5.0
    assert one.wedged_seconds(70.0, [*GROUPS, *OTHERS]) == 0.0  # no lighthouse
    stopped = fault("freeze", OTHERS[1])
    one.begin(stopped, 71.0)
    assert one.wedged_seconds(80.0, TARGETS) == 0.0  # the store stands still
    one.end(stopped, 81.0)
    assert one.wedged_seconds(90.0, TARGETS) == 10.0
