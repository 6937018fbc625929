"""The group that the others wait for, the pace of a job, and its alerts: dialogues of records, at times of our own."""

from __future__ import annotations

import pytest

from keepstep_metrics.api import job_views, span_views
from keepstep_metrics.history.findings.alerts import alerts
from keepstep_metrics.history.findings.blame import blame
from keepstep_metrics.history.findings.pace import sparks, steps_per_second
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.machine import MetricsCore
from keepstep_metrics.history.work import whole
from keepstep_metrics.lighthouse.live_status import NOTHING
from tests.unit.keepstep_metrics.history.job_driver import T, World, joined

STEP = 0.125
BUSY = {"r0:1": 0.055, "r1:1": 0.055, "r2:1": 0.054, "r3:1": 0.125}


def with_a_slow_group(until: int = 20) -> World:
    """Four groups that commit together; r3 needs the whole step, the others wait for it."""
    world = joined(*BUSY)
    for second in range(10, until):
        for name, busy in BUSY.items():
            world.steps(name, second, second + 1, STEP, busy_seconds=busy, quorum_seconds=(STEP - busy) / 2)
    return world


def test_the_slow_group_is_named_and_the_others_only_wait() -> None:
    world = with_a_slow_group()
    found = blame(world.job)
    assert found is not None
    assert found.slow == ("r3",)
    assert found.sentence == "r3 is slow (125 ms, usual 55 ms): the others wait 56 % of their time"
    assert found.wait_share == pytest.approx(0.56)
    now = job_views.now_view(world.job, NOTHING, T + 20)
    assert [one.name for one in now.groups if one.straggler] == ["r3"]
    assert [one.name for one in alerts(world.job, T + 20)] == ["GroupIsAStraggler"]


def test_the_sentence_of_the_goodput_says_how_long_the_groups_waited_for_slow_ones() -> None:
    world = with_a_slow_group()
    told = whole(span_views.goodput(world.job, T + 11, T + 20))
    assert told.goodput is not None
    assert told.sentence == (
        f"goodput {100 * told.goodput:.0f} %; now r3 is slow (125 ms, usual 55 ms): the others wait 56 % of their time"
    )
    quorums = joined("a:1", "b:1")
    quorums.steps("a:1", 10, 20, quorum_seconds=0.5, participants=2)
    quorums.steps("b:1", 10, 20, participants=2)
    told = whole(span_views.goodput(quorums.job, T + 11, T + 20))
    assert told.sentence == ("goodput 75 %; the groups waited 25 % of their time for quorums with a slow group")
    equal = joined("a:1", "b:1")
    for name in ("a:1", "b:1"):
        equal.steps(name, 10, 20)
    assert whole(span_views.goodput(equal.job, T + 10, T + 20)).sentence == "goodput 100 %"


def test_the_time_in_which_a_group_is_slow_is_kept_over_a_restart_and_ends_with_it() -> None:
    world = with_a_slow_group()

    def slow(core: MetricsCore) -> list[tuple[float, float]]:
        view = whole(span_views.timeline(core.jobs[world.job.name], T, T + 40, 100))
        return [span for one in view.groups if one.name == "r3" for span in one.slow]

    ((since, until),) = slow(world.core)
    assert T + 10 < since < T + 20
    assert until == T + 40
    again = MetricsCore()
    again.load(world.core.dump())
    assert slow(again) == slow(world.core)
    world.happens(25, "lost", "r3:1", reason="killed", member=True)
    for second in range(25, 29):
        for name in [*BUSY][:3]:
            world.steps(name, second, second + 1, STEP, busy_seconds=0.055)
    world.happens(30, "joined", "r3:2", member=False)
    world.steps("r3:2", 30, 32, STEP, busy_seconds=0.055)
    assert slow(world.core)[0][1] < T + 40
    assert blame(world.job) is None


def test_two_slow_groups_are_both_named_and_equal_groups_are_not() -> None:
    world = joined(*(f"r{number}:1" for number in range(6)))
    for second in range(10, 20):
        for number in range(6):
            busy = {4: 0.1, 5: 0.12}.get(number, 0.05)
            world.steps(f"r{number}:1", second, second + 1, STEP, busy_seconds=busy)
    found = blame(world.job)
    assert found is not None
    assert found.sentence.startswith("r5 is slow (120 ms, usual 50 ms); so is r4: the others wait ")
    equal = joined("a:1", "b:1", "c:1")
    for name in ("a:1", "b:1", "c:1"):
        equal.steps(name, 10, 20, STEP, busy_seconds=0.1)
    assert blame(equal.job) is None
    assert alerts(equal.job, T + 20) == ()


def test_a_loss_that_a_group_computed_before_it_healed_does_not_count() -> None:
    world = joined("a:1", "b:1")
    for second in range(10, 20):
        world.steps("a:1", second, second + 1, values={"loss": 0.5})
    world.steps("b:1", 18, 19, heal_seconds=0.2, values={"loss": 9.0})
    world.steps("b:1", 19, 20, values={"loss": 0.7})
    steps = span_views.steps(world.job, T + 10, T + 21, 11, T + 21)
    assert steps.values["loss"] == (None, *[0.5] * 9, 0.6)
    assert steps.group_values["loss"]["b"] == (*[None] * 10, pytest.approx(0.7))


def test_the_pace_is_of_the_last_seconds_and_falls_when_a_job_stands() -> None:
    world = joined("a:1")
    assert steps_per_second(Job("new", T), T) is None
    for second in range(10, 200):
        world.steps("a:1", second, second + 1, 0.25)
    assert steps_per_second(world.job, T + 200) == pytest.approx(1.0, rel=0.2)
    standing = steps_per_second(world.job, T + 800)
    assert standing is not None
    assert standing < 0.05
    assert len(sparks(world.job, T + 200)) == 60


def test_a_job_that_stands_is_critical_and_heals_that_fail_are_seen() -> None:
    world = joined("a:1", "b:1")
    world.steps("a:1", 10, 20)
    for second in range(21, 25):
        world.happens(second, "heal_failed", "b:1", reason="no route to a")
    assert [one.name for one in alerts(world.job, T + 25)] == ["HealsFail"]
    assert alerts(world.job, T + 25)[0].sentence == "4 heals failed in ten minutes; b failed to heal: no route to a"
    group = next(one for one in job_views.now_view(world.job, NOTHING, T + 25).groups if one.name == "b")
    assert (group.failed_heals, group.error) == (4, "failed to heal: no route to a")
    assert alerts(world.job, T + 300)[0].severity == "critical"


def test_a_group_counts_its_restarts_and_keeps_its_last_error() -> None:
    world = joined("a:1", "b:1")
    world.happens(20, "lost", "b:1", reason="its process died", member=True)
    world.happens(30, "joined", "b:2", member=False)
    groups = {one.name: one for one in job_views.now_view(world.job, NOTHING, T + 31).groups}
    assert (groups["b"].restarts, groups["b"].error, groups["b"].error_at) == (1, "its process died", T + 20)
    assert (groups["a"].restarts, groups["a"].error) == (0, "")


def test_a_member_that_stays_without_copies_is_an_alert_and_lost_shards_are_critical() -> None:
    world = joined("a:1", "b:1")
    why = "its keeper b:1 has no copies: no memory"
    world.happens(10, "exposed", "a:1", reason=why)
    assert not [one for one in alerts(world.job, T + 60) if one.name == "MemberIsExposed"]
    (found,) = (one for one in alerts(world.job, T + 80) if one.name == "MemberIsExposed")
    assert found.sentence == f"the loss of a member would lose its shards: a ({why})"
    world.happens(81, "covered", "a:1", keepers="b:1")
    assert not [one for one in alerts(world.job, T + 90) if one.name == "MemberIsExposed"]
    world.happens(91, "exposed", "a:1", reason=why)
    world.happens(92, "lost", "a:1", reason="silent")
    world.happens(93, "shards_lost", "", step=7)
    assert [one.name for one in alerts(world.job, T + 200) if one.severity == "critical"] == ["ShardsAreLost"]
    assert not [one for one in alerts(world.job, T + 200) if one.name == "MemberIsExposed"], "it is gone"
