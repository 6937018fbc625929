"""Histories without a violation: odd but fair ones, and logs that are missing, begin late or end early."""

from __future__ import annotations

import pytest

from tests.simulation.checks.history import EVENTS, report_on
from tests.unit.keepstep_chaos.histories.history_story import Story, valid


def test_a_valid_history_has_no_violation_and_is_summed_up() -> None:
    report = report_on(valid().numbered())
    assert report.fine, report.violations
    assert (report.event_logs, report.step_logs, report.epochs, report.not_covered) == (2, 3, 2, [])
    job = report.jobs["job"]
    assert (job.groups, job.incarnations, job.quorums, job.epochs) == (2, 3, 4, 2)
    assert (job.steps, job.steps_again) == (9, 1)


def test_a_step_that_only_the_dead_had_is_committed_again() -> None:
    assert report_on(valid().numbered()).jobs["job"].steps_again == 1


def test_groups_that_were_parted_may_both_commit_a_step_if_they_do_not_go_on_from_it_together() -> None:
    story = Story()
    story.event(EVENTS, 1, "term", owner="one")
    story.start("a:1", "b:1")
    story.quorum(EVENTS, 1, 1, "a:1")
    story.commit("a:1")
    story.quorum(EVENTS, 1, 2, "b:1")
    story.commit("b:1")
    story.quorum(EVENTS, 1, 3, "a:1", "b:1")
    apart = {name: list(lines) for name, lines in story.logs.items()}
    story.heal("a:1", "b:1")
    story.commit("a:1", "b:1")
    assert report_on(story.numbered()).fine
    story.logs, story.held["a:1"] = apart, (1, 1)
    story.held["b:1"] = 1, 2
    story.commit("a:1", "b:1")
    assert set(report_on(story.numbered()).counts) == {"one_state"}


def test_a_group_that_loads_a_checkpoint_or_breaks_may_commit_a_step_again() -> None:
    for event in ("loaded", "torn"):
        story = valid()
        story.held["b:1"] = 5, 2
        story.step("b:1", event, lineage=2)
        story.quorum("l2.jsonl", 2, 5, "b:1")
        story.commit("b:1")
        assert report_on(story.numbered()).fine, event


def test_a_group_that_takes_part_without_healing_stays_behind() -> None:
    story = valid()
    story.start("c:1")
    story.quorum("l2.jsonl", 2, 5, "b:1", "c:1")
    story.commit("b:1", participants=2)
    story.commit("c:1", participants=2)
    story.logs["c:1.jsonl"][-1]["behind"] = True
    story.held["c:1"] = 1, "c:1"
    story.commit("c:1", participants=2)
    story.logs["c:1.jsonl"][-1]["behind"] = True
    assert report_on(story.numbered()).fine


def test_an_evicted_incarnation_that_is_readmitted_may_come_back() -> None:
    story = valid()
    story.event("l2.jsonl", 2, "readmitted", "a", by="ann", quorum_id=4)
    story.quorum("l2.jsonl", 2, 5, "a:2", "b:1")
    assert report_on(story.numbered()).fine


def test_an_evicted_incarnation_may_come_back_after_its_job_was_deleted() -> None:
    story = valid()
    story.event("l2.jsonl", 2, "job_deleted", by="ann", quorum_id=4, evicted=[])
    story.quorum("l2.jsonl", 2, 5, "a:2", "b:1")
    assert report_on(story.numbered()).fine


@pytest.mark.parametrize("missing", sorted(valid().logs))
def test_a_log_that_is_missing_is_named_and_breaks_nothing(missing: str) -> None:
    logs = valid().numbered()
    del logs[missing]
    report = report_on(logs)
    assert report.fine
    assert len(report.not_covered) == 1


def test_logs_that_begin_in_the_middle_are_named_and_break_nothing() -> None:
    for name, lines in valid().numbered().items():
        for first in range(1, len(lines)):
            report = report_on({**valid().numbered(), name: lines[first:]})
            assert report.fine, (name, first, report.violations)
            assert any("begins in the middle" in sentence for sentence in report.not_covered)


def test_logs_that_end_anywhere_break_nothing() -> None:
    for name, lines in valid().numbered().items():
        for end in range(1, len(lines)):
            assert report_on({**valid().numbered(), name: lines[:end]}).fine, (name, end)


def test_without_event_logs_or_step_logs_the_report_says_which_to_write() -> None:
    logs = valid().numbered()
    (told,) = report_on({name: lines for name, lines in logs.items() if name.startswith("l")}).not_covered
    assert "KEEPSTEP_STEP_LOG" in told
    (told,) = report_on({name: lines for name, lines in logs.items() if not name.startswith("l")}).not_covered
    assert "--event-log" in told
