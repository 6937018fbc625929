"""Kills of the demo: which group, when, and the report at the end."""

from typing import Any

import pytest

from keepstep_cli.demo.demo_story import LIGHTHOUSE, State, Story


def committed(story: Story, group: str, t: float, step: int, quorum_id: int, participants: int) -> None:
    entry = {"t": t, "event": "committed", "step": step, "quorum_id": quorum_id, "participants": participants}
    story.heard(group, entry)


def all_commit(story: Story, t: float, step: int, quorum_id: int) -> None:
    for group in story.groups:
        committed(story, group, t, step, quorum_id, len(story.groups))


def begun(*victims: str) -> Story:
    story = Story(["r0", "r1", "r2"], victims, settle=1.0)
    all_commit(story, 100.0, 1, 1)
    return story


def kill(story: Story, victim: str, at: float) -> None:
    assert story.next_kill(at) == victim
    story.killed(victim, at)


def test_nobody_is_killed_before_all_have_trained_together_for_a_while() -> None:
    story = Story(["r0", "r1"], ["r0"], settle=1.0)
    assert story.next_kill(100.0) is None
    committed(story, "r0", 100.0, 1, 1, 1)
    assert story.next_kill(102.0) is None
    all_commit(story, 102.0, 2, 2)
    assert story.next_kill(102.9) is None
    assert story.next_kill(103.0) == "r0"
    assert story.next_kill(103.0) is None


def test_the_time_to_the_next_commit_is_that_of_the_first_step_without_the_victim() -> None:
    story = begun("r1")
    kill(story, "r1", 110.0)
    committed(story, "r0", 110.01, 2, 1, 3)  # was under way
    assert story.kills[0].next_commit is None
    committed(story, "r0", 110.3, 3, 2, 2)
    committed(story, "r2", 110.4, 3, 2, 2)
    assert story.kills[0].next_commit == pytest.approx(0.3)
    assert story.kills[0].back is None
    assert not story.over(200.0)


def test_the_summary_has_the_time_until_killed_groups_are_back_without_the_lighthouse() -> None:
    story = begun("r1", LIGHTHOUSE)
    story.noted("restarts are warm", 105.0)
    kill(story, "r1", 110.0)
    committed(story, "r0", 110.3, 3, 2, 2)
    all_commit(story, 110.5, 4, 3)
    kill(story, LIGHTHOUSE, 120.0)
    all_commit(story, 129.0, 6, 4)
    assert story.summary()["seconds_from_kill_until_the_group_is_back"] == {"p50": 0.5, "max": 0.5}
    assert story.happenings[1] == "  5.00 s  restarts are warm"


def test_a_group_is_back_when_it_commits_with_all_others() -> None:
    story = begun("r1", "r2")
    kill(story, "r1", 110.0)
    committed(story, "r0", 110.3, 3, 2, 2)
    assert story.groups["r1"].state is State.DOWN
    story.restarted("r1")
    story.heard("r1", {"t": 113.0, "event": "quorum", "step": 0, "quorum_id": 3, "participants": 3})
    assert story.groups["r1"].state is State.HEALING
    story.heard("r1", {"t": 113.1, "event": "healed", "step": 9, "quorum_id": 3, "bytes": 1000, "seconds": 0.1})
    committed(story, "r1", 113.2, 10, 3, 2)
    assert story.kills[0].back is None
    assert story.groups["r1"].state is State.TRAINING
    committed(story, "r1", 113.3, 11, 3, 3)
    assert story.kills[0].back == pytest.approx(3.3)
    assert story.bytes_healed == 1000
    assert story.next_kill(113.4) is None
    committed(story, "r1", 113.5, 12, 3, 3)
    assert story.next_kill(114.5) == "r2"


def test_a_killed_lighthouse_counts_until_a_step_that_needed_the_new_one() -> None:
    story = begun(LIGHTHOUSE)
    kill(story, LIGHTHOUSE, 110.0)
    all_commit(story, 109.99, 50, 1)  # read from the log late
    all_commit(story, 110.01, 51, 1)  # had its quorum
    assert story.kills[0].next_commit is None
    all_commit(story, 110.7, 52, 1)
    assert story.kills[0].next_commit == pytest.approx(0.7)
    all_commit(story, 110.8, 53, 1)
    assert not story.over(111.6)
    assert story.over(111.7)


def ended(weights: tuple[str, str, str]) -> Story:
    story = begun()
    story.over(200.0)
    for group, digest in zip(story.groups, weights, strict=True):
        story.ended(group, 0.9, digest)
    return story


def test_it_succeeded_when_all_weights_are_the_same() -> None:
    assert ended(("aa", "aa", "aa")).succeeded()


def test_it_failed_when_weights_differ() -> None:
    assert not ended(("aa", "aa", "ab")).succeeded()


def test_it_failed_when_a_group_never_ended() -> None:
    story = begun()
    story.ended("r0", 0.9, "aa")
    assert not story.succeeded()


def test_it_failed_when_somebody_was_not_killed_or_did_not_come_back() -> None:
    story = begun("r1")
    for group in story.groups:
        story.ended(group, 0.9, "aa")
    assert not story.succeeded()
    kill(story, "r1", 102.0)
    assert not story.succeeded()


def test_the_summary_holds_every_figure_of_the_table() -> None:
    story = begun("r1", "r2")
    for victim, wait in (("r1", 0.2), ("r2", 0.4)):
        at = story._last_commit + 5
        kill(story, victim, at)
        survivor = "r0"
        quorum_id = story.quorum_id
        committed(story, survivor, at + wait, story.step + 1, quorum_id + 1, 2)
        committed(story, victim, at + 3, story.step + 1, quorum_id + 2, 3)
        all_commit(story, at + 4, story.step + 1, quorum_id + 2)
    for group in story.groups:
        story.ended(group, 0.95, "aa")
    summary: dict[str, Any] = story.summary()
    assert summary["kills"] == summary["kills_survived"] == 2
    assert summary["seconds_from_kill_to_next_commit"] == {"p50": 0.3, "max": 0.4}
    assert summary["weights_bit_identical"] is True
    assert summary["test_accuracy"] == {"r0": 0.95, "r1": 0.95, "r2": 0.95}
    assert [one["victim"] for one in summary["each_kill"]] == ["r1", "r2"]
