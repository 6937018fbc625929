"""Records in, the state of a job out: dialogues with the core of the metrics service, with time as a number."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_mesh.protocol.telemetry_records import BadBatchError, read_batch
from keepstep_metrics.api import job_views, log_views, span_views
from keepstep_metrics.history.findings import goodput, straggler_view
from keepstep_metrics.history.findings.alerts import alerts
from keepstep_metrics.history.findings.marks import marks
from keepstep_metrics.history.histogram import BINS, bin_of, quantile
from keepstep_metrics.history.job import MAX_EVENTS, SILENT_SECONDS
from keepstep_metrics.history.machine import MetricsCore
from keepstep_metrics.history.timeseries.timeline import State
from keepstep_metrics.history.work import whole
from keepstep_metrics.lighthouse.live_status import NOTHING
from tests.support.services.metrics_driver import JOB, Teller, event, step
from tests.unit.keepstep_metrics.history.job_driver import T, World, joined


def test_a_kill_and_a_return_are_a_loss_a_wait_and_a_heal() -> None:
    world = joined("a:1", "b:1")
    world.steps("a:1", 10, 20)
    world.steps("b:1", 10, 20)
    world.happens(20.5, "lost", "b:1", reason="its connection ended", member=True)
    world.happens(30, "joined", "b:2", member=False)
    world.happens(32, "heal_began", "b:2", step=25, source="a:1")
    world.happens(34, "healed", "b:2", step=25, source="a:1", via="direct", bytes=100, seconds=2.0, bytes_per_second=50)
    world.happens(34, "quorum", quorum_id=3, members=["a:1", "b:2"])
    world.steps("b:2", 30, 35, 5, quorum_seconds=2.0, heal_seconds=2.0, quorum_id=3)
    assert world.states("b", 40) == [
        (0, 10, "waiting_quorum"),
        (10, 20.5, "training"),
        (20.5, 30, "lost"),
        (30, 32, "waiting_quorum"),
        (32, 34, "healing"),
        (34, 40, "training"),
    ]
    assert world.job.participants == ["a", "b"]
    (heal,) = log_views.transfers(world.job, NOTHING).transfers
    assert (heal.name, heal.source, heal.bytes_done, heal.began - T, heal.ended - T) == ("b", "a", 100, 32, 34)


def test_a_step_that_is_discarded_is_a_retry_and_a_short_wait_is_part_of_a_step() -> None:
    world = joined("a:1")
    world.steps("a:1", 10, 12, quorum_seconds=0.04)
    world.steps("a:1", 12, 13, committed=False, reason="a peer died")
    world.steps("a:1", 13, 15)
    assert world.states("a", 15)[1:] == [(10, 12, "training"), (12, 13, "retrying"), (13, 15, "training")]
    told = whole(span_views.goodput(world.job, T, T + 15))
    spent = {state: seconds for state, seconds in told.seconds.items() if seconds}
    assert spent == {"training": 4, "retrying": 1, "waiting_quorum": 10}
    assert told.goodput == pytest.approx(4 / 15)
    told = whole(span_views.goodput(world.job, T, T + 16))
    assert (told.steps_committed, told.steps_discarded) == (4, 1)


def test_a_wait_for_a_quorum_that_forms_as_before_is_a_wait_for_a_slow_group() -> None:
    world = joined("a:1", "b:1")
    same = {"quorum_id": 1, "epoch": 1, "participants": 2, "quorum_seconds": 0.5}
    world.steps("a:1", 10, 11, **same)  # its first step
    world.steps("a:1", 11, 12, **same)
    dumped = msgpack.unpackb(msgpack.packb(world.core.dump()), strict_map_key=False)
    world.core = MetricsCore()
    world.core.load(dumped)
    world.steps("a:1", 12, 13, **same)
    changes = (
        {"quorum_id": 2},  # a group was lost, and another one joined and heals
        {"quorum_id": 2, "participants": 3},  # the others waited for the heal
        {"quorum_id": 2, "participants": 3, "epoch": 2},  # a lighthouse took over
        {"quorum_id": 2, "participants": 0, "epoch": 2, "committed": False},
    )
    for t, change in enumerate(changes, 13):
        world.steps("a:1", t, t + 1, **{**same, **change})
    waits = {begin: state for begin, _, state in world.states("a", 17) if state.startswith("waiting_")}
    assert [t for t, state in waits.items() if state == "waiting_slow_group"] == [11, 12]
    assert [t for t, state in waits.items() if state == "waiting_quorum"] == [0, 13, 14, 15, 16]
    told = whole(span_views.goodput(world.job, T + 10, T + 17))
    assert told.seconds["waiting_slow_group"] == told.badput["CUSTOM_BADPUT_EVENTS"] == 1.0


def test_a_trainer_of_the_release_before_reports_no_epoch_and_its_waits_are_told_apart_all_the_same() -> None:
    world = joined("a:1", "b:1")
    world.steps("a:1", 10, 12, participants=2, quorum_seconds=0.5)
    assert [state for _, _, state in world.states("a", 12)].count("waiting_slow_group") == 1
    world.steps("a:2", 12, 13, participants=2, quorum_seconds=0.5)  # another incarnation, in its first step
    assert [state for _, _, state in world.states("a", 13)].count("waiting_slow_group") == 1


def test_steps_that_are_told_after_the_loss_end_where_the_loss_was() -> None:
    world = joined("a:1")
    world.happens(15, "lost", "a:1", reason="killed", member=True)
    world.steps("a:1", 10, 16, 2, late=3)  # its clock is ahead
    assert world.states("a", 20)[1:] == [(10, 15, "training"), (15, 20, "lost")]


def test_a_group_that_leaves_on_purpose_has_no_life_until_it_comes_back() -> None:
    world = joined("a:1")
    world.steps("a:1", 10, 15)
    world.happens(15, "drain", "a:1", reason="maintenance", by="someone")
    world.steps("a:1", 15, 16)
    world.happens(17, "left", "a:1", reason="drained")
    world.happens(100, "joined", "a:2", member=False)
    assert world.states("a", 110)[1:] == [(10, 15, "training"), (15, 17, "draining"), (100, 110, "waiting_quorum")]
    assert whole(span_views.goodput(world.job, T + 20, T + 90)).goodput is None
    assert not world.job.failures


def test_the_time_in_which_a_spare_stands_by_does_not_count() -> None:
    world = joined("a:1")
    world.happens(0, "joined", "b:1", member=False)
    standby = {"kind": "state", "t": T + 2, "state": "standby"}
    world.core.apply(read_batch(Teller("b:1").batch(standby)), T + 2)
    assert world.job.joining == set()
    world.happens(40, "spare_in", "b:1", reason="1 of 2 groups were there")
    world.happens(41, "quorum", quorum_id=2, members=["a:1", "b:1"])
    world.steps("b:1", 41, 45)
    assert world.states("b", 45) == [
        (0, 2, "waiting_quorum"),
        (2, 40, "standby"),
        (40, 41, "waiting_quorum"),
        (41, 45, "training"),
    ]
    assert sum(world.job.groups["b"].timeline.seconds(T, T + 45).values()) == 7


def test_a_group_whose_script_ended_with_an_error_is_lost_until_it_comes_back() -> None:
    world, why = joined("a:1", "b:1"), "the script ended with ValueError: no data"
    world.happens(15, "left", "a:1", reason=why, cause="failed", step=5)
    world.happens(25, "joined", "a:2", member=False)
    assert world.states("a", 30)[-2:] == [(15, 25, "lost"), (25, 30, "waiting_quorum")]
    (failure,) = log_views.failures(world.job, 10).failures
    assert (failure.name, failure.cause) == ("a", why)
    assert [(one.kind, one.sentence) for one in marks(world.job.events, T, T + 30, 1) if one.kind == "failure"] == [
        ("failure", f"a failed at step 5: {why}")
    ]


@pytest.mark.parametrize("end", ["lost", "left"])
def test_a_group_that_was_refused_before_it_trained_is_no_loss(end: str) -> None:
    world = joined("a:1", "b:1")
    world.happens(10, "joined", "c:1", member=False)
    world.happens(11, "denied", "c:1", code="layout", reason="the parameters of c differ from those of a")
    world.happens(12, end, "c:1", reason="exit code 78", cause="failed", step=0, member=False)
    for name in ("a:1", "b:1"):
        world.steps(name, 10, 3600)
    told = whole(span_views.goodput(world.job, T + 10, T + 3600))
    assert told.goodput == pytest.approx(1.0, abs=0.001)
    assert (told.failures, told.mean_time_to_recover) == (0, None)
    assert world.states("c", 3600) == [(10, 12, "waiting_quorum")]


def test_a_group_that_comes_back_after_the_end_of_the_job_is_no_loss() -> None:
    world = joined("a:1", "b:1")
    world.happens(20, "lost", "b:1", reason="killed", member=True)
    world.happens(60, "closed", step=50, groups=["a:1"])
    world.happens(70, "joined", "b:2", member=False)
    world.happens(71, "left", "b:2", reason="the job is closed", cause="failed", step=0)
    world.happens(72, "left", "a:1", reason="shutdown", cause="finished", step=50)
    world.happens(72, "job_finished", step=50)
    world.happens(80, "joined", "b:3", member=False)
    world.happens(81, "lost", "b:3", reason="killed", member=False)
    assert world.states("b", 200)[-3:] == [(20, 60, "lost"), (70, 71, "waiting_quorum"), (80, 81, "waiting_quorum")]
    assert len(world.job.failures) == 1


def test_an_eviction_forgets_a_lost_group_and_is_no_failure_itself() -> None:
    world = joined("a:1", "b:1", "c:1")
    world.happens(20, "lost", "b:1", reason="its connection ended", member=True)
    world.happens(21, "quorum", quorum_id=2, members=["a:1", "c:1"])
    world.happens(30, "evicted", "b:1", reason="its host is gone", by="ann", incarnations=["b:1"])
    world.happens(40, "evicted", "c", reason="bad GPU", by="ann", incarnations=["c:1"])
    world.happens(40, "lost", "c:1", reason="evicted by ann: bad GPU", member=True)
    world.happens(41, "quorum", quorum_id=3, members=["a:1"])
    assert world.states("b", 100)[-1] == (20, 30, "lost")
    assert "lost" not in {state for _, _, state in world.states("c", 100)}
    assert [one.name for one in world.job.failures] == ["b"]
    dumped = MetricsCore()
    dumped.load(msgpack.unpackb(msgpack.packb(world.core.dump()), strict_map_key=False))
    assert dumped.jobs[JOB].groups["c"].told_to_leave
    world.happens(50, "joined", "c:2", member=False)
    world.happens(51, "quorum", quorum_id=4, members=["a:1", "c:2"])
    world.happens(60, "lost", "c:2", reason="killed", member=True)
    assert world.states("c", 100)[-1] == (60, 100, "lost")


def test_a_group_that_is_killed_while_it_drains_is_gone() -> None:
    world = joined("a:1", "b:1")
    world.happens(20, "drain", "b:1", reason="maintenance", by="ann")
    world.happens(22, "lost", "b:1", reason="killed", member=True)
    assert world.states("b", 100)[-1] == (20, 22, "draining")
    assert not len(world.job.failures)


def test_a_failure_is_over_for_the_others_under_the_next_quorum_and_for_the_group_when_it_commits() -> None:
    world = joined("a:1", "b:1")
    world.steps("a:1", 10, 20)
    world.happens(20, "lost", "b:1", reason="its connection ended", member=True)
    world.steps("a:1", 20, 21)  # what was under way under the old quorum
    world.happens(21, "quorum", quorum_id=2, members=["a:1"])
    world.steps("a:1", 21, 23, quorum_id=2)
    (failure,) = log_views.failures(world.job, 10).failures
    assert (failure.name, failure.cause, failure.seconds_to_commit) == ("b", "its connection ended", 2)
    assert failure.seconds_to_return is None
    world.happens(40, "joined", "b:2", member=False)
    world.steps("b:2", 40, 45, 5, quorum_id=3)
    (failure,) = log_views.failures(world.job, 10).failures
    assert (failure.seconds_to_commit, failure.seconds_to_return, failure.recovered_at) == (2, 25, T + 45)
    told = whole(span_views.goodput(world.job, T, T + 60))
    assert (told.failures, told.mean_time_to_recover, told.mean_time_to_return) == (1, 2, 25)


def test_a_group_whose_loss_nobody_told_of_is_lost_when_a_quorum_forms_without_it() -> None:
    world = joined("a:1", "b:1", "c:1")
    for name in ("a:1", "b:1", "c:1"):
        world.steps(name, 10, 20)
    world.happens(20, "left", "c:1", reason="done")
    world.happens(30, "quorum", quorum_id=2, members=["a:1"])  # the lighthouse that lost b died before it said so
    world.steps("a:1", 20, 60)
    assert world.states("b", 60)[1:] == [(10, 30, "training"), (30, 60, "lost")]
    assert world.states("c", 60)[1:] == [(10, 20, "training")]
    world.steps("b:1", 20, 70, 50)  # it lived, and was only slow
    assert world.states("b", 70)[1:] == [(10, 70, "training")]


def test_a_quorum_of_many_is_a_short_sentence_and_all_of_them_take_part() -> None:
    world = joined(*(f"g{number}" for number in range(1000)))
    assert len(world.job.participants) == 1000
    assert world.job.events[-1].sentence.endswith("g18, g19 and 980 more")


def test_a_quorum_that_is_told_late_does_not_take_the_place_of_a_later_one() -> None:
    world = joined("a:1", "b:1")
    world.happens(30, "quorum", quorum_id=3, members=["a:1", "b:1"])
    world.happens(20, "quorum", quorum_id=2, members=["a:1"])
    assert (world.job.participants, world.job.quorum_id) == (["a", "b"], 3)


def test_a_job_that_begins_again_counts_its_quorums_from_one_again() -> None:
    world = joined("a:1", "b:1")
    world.happens(20, "quorum", quorum_id=7, members=["a:1", "b:1"])
    world.steps("a:1", 20, 50)
    world.happens(50, "joined", "c:1", member=False)  # at a lighthouse that knows nothing of the one before
    world.happens(60, "quorum", quorum_id=1, members=["c:1"])
    assert (world.job.participants, world.job.quorum_id, world.job.step) == (["c"], 1, 0)
    world.happens(70, "lost", "c:1", reason="killed", member=True)
    world.happens(72, "quorum", quorum_id=2, members=["d:1"])
    world.steps("d:1", 72, 73, quorum_id=2)
    assert log_views.failures(world.job, 1).failures[0].seconds_to_commit == 3


def test_a_group_that_is_slow_by_itself_is_a_straggler_and_those_that_wait_for_it_are_not() -> None:
    world = joined(*"abcd")
    for second in range(10, 60):
        for name in "abcd":
            slow = 0.9 if name == "c" and second < 40 else 0.4
            world.steps(name, second, second + 1, busy_seconds=slow + 0.001 * ord(name) % 0.01)
        told = {one.name: one.straggler for one in straggler_view.stragglers_view(world.job).groups}
        if second == 35:
            assert told == {"a": False, "b": False, "c": True, "d": False}
    found = straggler_view.stragglers_view(world.job)
    assert found.groups[0].straggler  # of its last 64 steps most are slow
    (said,) = (one.sentence for one in world.job.events if one.event == "straggler")
    assert said.startswith("c is slow: 0.90")
    for second in range(60, 110):
        for name in "abcd":
            world.steps(name, second, second + 1, busy_seconds=0.4)
    assert not any(one.straggler for one in straggler_view.stragglers_view(world.job).groups)
    assert straggler_view.stragglers_view(world.job).median_seconds == pytest.approx(0.4, rel=0.05)


def test_of_two_groups_and_of_silent_ones_none_is_a_straggler() -> None:
    world = joined("a", "b", "c")
    for name, busy in (("a", 0.1), ("b", 0.9)):
        world.steps(name, 10, 40, busy_seconds=busy)
    assert straggler_view.stragglers_view(world.job).median_seconds is None
    world.steps("c", 10, 40, busy_seconds=0.1)
    world.steps("a", 40, 41 + SILENT_SECONDS, busy_seconds=0.1)
    assert straggler_view.stragglers_view(world.job).groups == ()


def slow_since(name: str, *others: str) -> World:
    """Half a minute in which ``name`` needs much longer for its steps than the others."""
    world = joined(name, *others)
    for second in range(10, 40):
        for one in (name, *others):
            world.steps(one, second, second + 1, busy_seconds=0.9 if one == name else 0.1)
    return world


def test_the_steps_of_a_straggler_are_counted_since_it_became_one() -> None:
    world = slow_since("c:1", "a:1", "b:1")
    steps = straggler_view.stragglers_view(world.job).groups[0].steps
    assert 5 < steps < 20
    world.steps("c:1", 40, 43, busy_seconds=0.9)
    world.steps("c:1", 43, 44, busy_seconds=0.9, committed=False)
    assert straggler_view.stragglers_view(world.job).groups[0].steps == steps + 3
    assert world.job.straggler(steps + 3) is world.job.groups["c"]
    assert world.job.straggler(steps + 4) is None
    world.happens(44, "drain", "c:1", reason="slow", by="someone")
    assert world.job.straggler(0) is None, "it is on its way out"


def test_a_group_that_comes_back_is_judged_by_its_own_steps() -> None:
    world = slow_since("c:1", "a:1", "b:1")
    world.happens(40, "left", "c:1", reason="drained")
    world.happens(41, "joined", "c:2", member=False)
    assert world.job.straggler(0) is None
    for second in range(42, 80):
        for one in ("a:1", "b:1", "c:2"):
            world.steps(one, second, second + 1, busy_seconds=0.1)
        assert world.job.straggler(0) is None
    assert [one.steps for one in straggler_view.stragglers_view(world.job).groups] == [0, 0, 0]


def test_a_batch_that_came_twice_or_in_part_is_counted_once() -> None:
    core, sender = MetricsCore(), Teller("a:1")
    first, second = sender.batch(step(T, 1), step(T + 1, 2)), sender.batch(step(T + 2, 3))
    assert [core.apply(read_batch(one), T)[0] for one in (first, first, second, first, second)] == [2, 0, 1, 0, 0]
    plain = msgpack.unpackb(first)
    plain["records"] += [step(T + 2, 3), step(T + 3, 4)]
    assert core.apply(read_batch(msgpack.packb(plain)), T)[0] == 1
    assert whole(span_views.goodput(core.jobs[JOB], T - 10, T + 10)).steps_committed == 4
    restarted = Teller("a:1")  # another process of that name begins at one again
    assert core.apply(read_batch(restarted.batch(step(T + 4, 5))), T)[0] == 1


def test_a_core_that_is_dumped_and_loaded_answers_as_before() -> None:
    world = joined("a:1", "b:1", "c:1")
    for name, busy in (("a:1", 0.1), ("b:1", 0.1), ("c:1", 0.5)):
        world.steps(name, 10, 80, busy_seconds=busy, values={"loss": 0.5})
    world.happens(81, "lost", "b:1", reason="killed", member=True)
    world.happens(82, "heal_began", "c:1", step=3, source="a:1")
    again = MetricsCore()
    again.load(msgpack.unpackb(msgpack.packb(world.core.dump()), strict_map_key=False))
    loaded = again.jobs[JOB]
    for view in (
        lambda job: job_views.now_view(job, NOTHING, T + 100),
        lambda job: whole(span_views.timeline(job, T, T + 100, 100)),
        lambda job: span_views.steps(job, T, T + 100, 100, T + 100),
        lambda job: whole(span_views.goodput(job, T, T + 100)),
        straggler_view.stragglers_view,
        lambda job: log_views.transfers(job, NOTHING),
        lambda job: log_views.failures(job, 10),
    ):
        assert view(loaded) == view(world.job)
    assert again.apply(read_batch(world.lighthouse.batch(event(T + 90, "joined", "b:2"))), T + 90)[1][0][1].id == 7
    body = world.workers["a:1"].batch(step(T + 100, 90))
    assert (again.apply(read_batch(body), T + 100)[0], again.apply(read_batch(body), T + 100)[0]) == (1, 0)


def test_a_snapshot_of_the_release_before_is_loaded() -> None:
    world = joined("a", "b")
    world.steps("a", 10, 70, 0.5, values={"loss": 2.0})
    dumped = world.core.dump()
    del dumped["now"], dumped["jobs"][0]["steps"], dumped["jobs"][0]["commits"]
    again = MetricsCore()
    again.load(msgpack.unpackb(msgpack.packb(dumped), strict_map_key=False))
    before, after = (span_views.steps(core.jobs[JOB], T, T + 100, 10, T + 100) for core in (world.core, again))
    assert (after.seconds, after.values) == (before.seconds, before.values)
    assert after.committed_per_second == (0.0,) * 10, "it did not count them for the job"


def test_columns_of_steps_tell_times_rates_quantiles_and_losses() -> None:
    world = joined("a", "b")
    world.steps("a", 10, 70, 0.5, values={"loss": 2.0})
    world.steps("b", 10, 70, 0.5, values={"loss": 4.0})
    told = span_views.steps(world.job, T, T + 100, 10, T + 100)
    assert len(told.t) == len(told.step) == len(told.committed_per_second) == len(told.values["loss"]) == 10
    assert told.committed_per_second[3] == pytest.approx(2)
    assert told.seconds["a"][3] == pytest.approx(0.5)
    assert told.values["loss"][3] == pytest.approx(3)
    assert told.quantiles["p50"][3] == pytest.approx(0.5, rel=0.1)
    assert told.step[9] is told.seconds["a"][9] is told.quantiles["p99"][9] is None
    assert told.step[:8] == tuple(sorted(told.step[1:7], key=int)) or told.step[0] is None


def test_a_step_counts_once_although_groups_report_it_in_different_seconds_and_again_after_the_job_went_back() -> None:
    world = joined("a", "b")
    world.steps("a", 10.4, 70.4, 2.5)
    world.steps("b", 10.6, 70.6, 2.5)
    world.happens(71, "went_back", **{"from": 34, "to": 10}, reason="no group with a later step takes part")
    world.happens(71, "quorum", quorum_id=2, members=["a", "b"])
    world.steps("a", 10.0, 20.0, 2.5, quorum_id=1)  # a late report
    world.steps("b", 80.0, 90.0, 2.5, quorum_id=2)
    per_second = span_views.steps(world.job, T, T + 100, 10, T + 100).committed_per_second
    assert [round(10 * one) for one in per_second] == [0, 3, 4, 4, 4, 4, 4, 1, 3, 1]


def test_the_steps_of_a_job_count_again_after_a_lighthouse_without_a_store_was_started_again() -> None:
    world, quorums = World(), 20
    for run in (0, 50):
        teller = Teller(f"a:{run}")
        for number in range(quorums):
            world.happens(run + number, "quorum", quorum_id=number + 1, members=[f"a:{run}"])
            body = teller.batch(step(T + run + number + 0.5, number + 1, quorum_id=number + 1))
            world.core.apply(read_batch(body), T + run + number + 1)
        assert world.job.step == quorums
    per_second = span_views.steps(world.job, T, T + 100, 2, T + 100).committed_per_second
    assert round(50 * sum(per_second)) == 2 * quorums


@given(st.lists(st.floats(0.001, 900), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_right_to_a_tenth(seconds, share) -> None:
    histogram = [0] * BINS
    for one in seconds:
        histogram[bin_of(one)] += 1
    exact = sorted(seconds)[max(0, -int(-share * len(seconds) // 1) - 1)]
    assert quantile(histogram, share) == pytest.approx(exact, rel=0.1)


def test_a_record_of_the_far_future_changes_nothing() -> None:
    core = MetricsCore()
    core.apply(read_batch(Teller("a:1").batch(step(T + 1000, 1))), T)
    assert not core.jobs


def test_memory_of_a_job_that_always_fails_is_bounded() -> None:
    world = World()
    world.happens(0, "joined", "a:0")
    world.happens(0, "quorum", quorum_id=1, members=["a:0"])
    for one in range(3000):
        world.happens(one, "joined", f"a:{one}")
        world.happens(one + 0.5, "lost", f"a:{one}", reason="x")
    job = world.job
    assert (len(job.events), len(job.failures), len(job.groups["a"].ends)) == (MAX_EVENTS, 1000, 4)


def test_records_of_a_day_ago_go_and_live_groups_stay() -> None:
    world = joined("a:1", "b:1")
    world.happens(20, "left", "b:1", reason="done")
    world.steps("a:1", 10, 30)
    world.core.forget_before(T + 25)
    assert world.states("a", 30) == [(10, 30, "training")]
    assert set(world.job.groups) == {"a"}
    assert world.job.groups["a"].timeline.state is State.TRAINING
    world.core.forget_before(T + 1000)
    assert not world.core.jobs


def test_a_group_that_was_not_heard_of_for_a_day_goes_and_one_that_waits_stays() -> None:
    world = joined("a:1", "b:1", "c:1")
    world.steps("a:1", 10, 20)
    world.steps("b:1", 10, 1020)
    world.core.forget_before(T + 1000)
    assert set(world.job.groups) == {"b", "c"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "nobody"}, "source must be one of"),
        ({"job": "a/b"}, "invalid job name"),
        ({"name": ""}, "must not be empty"),
        ({"first": -1}, "first must be an integer"),
        ({"records": {}}, "records must be a list"),
        ({"records": [1]}, "must be a map"),
        ({"records": [{"kind": "step", "t": float("nan")}]}, "t must be a finite number"),
        ({"records": [{**step(T, 1), "seconds": "1"}]}, "seconds must be"),
        ({"records": [{**step(T, 1), "values": [1]}]}, "values must be a map"),
        ({"source": "relay", "records": [{**event(T, "lost"), "job": "../x"}]}, "invalid job name"),
        ({"source": "lighthouse", "records": [{**event(T, "lost"), "detail": []}]}, "detail must be a map"),
    ],
)
def test_a_bad_batch_is_refused_with_what_is_wrong(change, said) -> None:
    plain = {"source": "worker", "name": "a", "job": JOB, "boot": "x", "first": 1, "records": []} | change
    with pytest.raises(BadBatchError, match=said):
        read_batch(msgpack.packb(plain))


def test_a_kind_of_a_newer_build_is_passed_over() -> None:
    core = MetricsCore()
    body = Teller("a:1").batch({"kind": "of tomorrow", "t": T}, step(T, 1))
    assert core.apply(read_batch(body), T)[0] == 2
    assert core.jobs[JOB].step == 1


def test_steps_that_were_lost_because_the_job_went_back_are_not_good() -> None:
    world = joined("a:1")
    world.steps("a:1", 10, 110)  # steps 11 to 110
    world.happens(110, "lost", "a:1", reason="killed")
    world.happens(110, "job_failed", step=110, reason="a:1 was lost")
    world.happens(120, "joined", "a:2", member=False)
    world.happens(120, "went_back", **{"from": 110, "to": 50, "lost_steps": 60, "reason": "no group was left"})
    assert world.job.step == 50
    assert world.states("a", 120) == [
        (0.0, 10.0, "waiting_quorum"),
        (10.0, 51.0, "training"),
        (51.0, 110.0, "retrying"),
    ]
    assert world.job.events[-1].sentence == "the job went back from step 110 to 50: no group was left"


def test_goodput_and_members_end_with_the_job() -> None:
    world = joined("a:1", "b:1")
    world.steps("a:1", 10, 20)
    world.happens(20, "left", "a:1", reason="shutdown", cause="finished", step=20)
    assert world.job.participants == ["b"]
    world.happens(20, "lost", "b:1", reason="killed")
    world.happens(20, "job_finished", step=20, reason="b:1 was lost: killed")
    assert world.job.participants == []
    until = (T, T + 1000)
    assert sum(goodput.group_seconds(world.job, *until).values()) == pytest.approx(40.0)
    assert [one.sentence for one in world.job.events][-3:] == [
        "a finished at step 20",
        "b was lost: killed",
        "the job finished at step 20: b:1 was lost: killed",
    ]


def test_a_parted_group_is_kept_out_and_not_lost_until_it_is_in_a_quorum_again() -> None:
    world = joined("a:1", "b:1")
    world.steps("b:1", 10, 20)
    world.happens(20, "parted", "b", cause="own", seconds=5.0, times=1, reason="b fails by itself: bad batch")
    world.happens(20, "quorum", quorum_id=2, members=["a:1"])
    now = job_views.now_view(world.job, NOTHING, T + 21)
    [b] = [one for one in now.groups if one.name == "b"]
    assert (now.kept_out, b.state, b.error) == (("b",), "waiting_quorum", "kept out: b fails by itself: bad batch")
    dumped = MetricsCore()
    dumped.load(msgpack.unpackb(msgpack.packb(world.core.dump()), strict_map_key=False))
    assert dumped.jobs[JOB].groups["b"].parted
    world.happens(25, "quorum", quorum_id=3, members=["a:1", "b:1"])
    assert job_views.now_view(world.job, NOTHING, T + 26).kept_out == ()


def test_records_count_at_once_after_the_clock_of_the_service_was_set_back() -> None:
    """Records of a month that has not come would otherwise hide all of those that come now."""
    world, month = joined("a:1", "b:1"), 30 * 86400
    world.steps("a:1", month, month + 20)
    world.happens(month + 20, "lost", "b:1", reason="its connection ended", member=True)
    world.happens(month + 20, "went_back", **{"from": 9, "to": 7}, reason="no group with a later step takes part")
    world.happens(month + 20, "job_deleted", job="other")
    world.steps("a:1", 10, 30)
    fired = [any(one.name == "JobWentBack" for one in alerts(world.job, T + t)) for t in (30, 700)]
    assert fired == [True, False], "an alert ends after ten minutes, not after a month"
    assert world.states("a", 30) == [(0, 10, "waiting_quorum"), (10, 30, "training")]
    assert world.job.groups["b"].timeline.state is State.LOST, "what is known of the present stays"
    assert [*world.job.failures] == []
    assert sum(committed for _, (committed, _, _) in world.job.groups["a"].steps.rings[0].rows(T, T + 31)) == 20
    assert world.job.last_seen == T + 30
    world.happens(31, "joined", "r0:1", job="other")
    assert "other" in world.core.jobs
