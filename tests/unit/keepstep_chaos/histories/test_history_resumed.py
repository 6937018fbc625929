"""Histories of jobs that were resumed, and of groups that took part without healing."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.checks.history import report_on
from tests.unit.keepstep_chaos.histories.history_story import Story

EVENTS = "l1.jsonl"


def rules(story: Story) -> Counter[str]:
    return report_on(story.numbered()).counts


def commit(story: Story, who: str, new_lineage: int | str, participants: int, **facts: object) -> None:
    step, lineage = story.held[who]
    story.held[who] = int(facts.pop("step", step + 1)), new_lineage  # type: ignore[call-overload]
    story.step(who, "committed", lineage=lineage, participants=participants, new_lineage=new_lineage, **facts)


def parted() -> Story:
    """b stands at step 3 and is away; a is started again, and loads a checkpoint of step 1."""
    story = Story()
    story.event(EVENTS, 1, "term", owner="one")
    story.start("a:1", "b:1")
    story.quorum(EVENTS, 1, 1, "a:1", "b:1")
    story.heal("b:1", "a:1")
    for _ in range(3):
        story.commit("a:1", "b:1")
    story.start("a:2")
    story.held["a:2"] = 1, "loaded:1"
    story.step("a:2", "loaded", lineage="loaded:1")
    return story


def test_a_group_of_before_a_resume_may_go_back_to_a_lower_step() -> None:
    story = parted()
    story.quorum(EVENTS, 1, 2, "a:2")
    commit(story, "a:2", "resumed:2:2", 1)
    story.quorum(EVENTS, 1, 3, "a:2", "b:1")
    story.heal("b:1", "a:2")
    for _ in range(2):
        for who in ("a:2", "b:1"):
            commit(story, who, "resumed:2:3", 2)
    assert not rules(story)


def test_beside_a_checkpoint_that_was_only_loaded_it_may_not() -> None:
    story = parted()
    story.quorum(EVENTS, 1, 3, "a:2", "b:1")
    story.heal("b:1", "a:2")
    for who in ("a:2", "b:1"):
        commit(story, who, "resumed:3:3", 2)
    assert set(rules(story)) == {"one_quorum"}


def behind() -> Story:
    story = Story()
    story.event(EVENTS, 1, "term", owner="one")
    story.start("a:1", "b:1")
    story.quorum(EVENTS, 1, 1, "a:1", "b:1")
    commit(story, "a:1", 1, 2)
    return story


def test_a_group_that_took_part_behind_has_a_lineage_of_its_own() -> None:
    story = behind()
    commit(story, "b:1", "behind:b:1:1", 2, behind=True)
    commit(story, "a:1", 1, 2)
    commit(story, "b:1", "behind:b:1:1", 2, behind=True)
    story.heal("b:1", "a:1")
    story.commit("a:1", "b:1")
    assert not rules(story)


@pytest.mark.parametrize("falls_behind", [True, False])
def test_others_may_commit_a_step_again_that_a_group_had_committed_if_it_took_part_behind_since(
    falls_behind: bool,
) -> None:
    story = behind()
    story.heal("b:1", "a:1")
    story.commit("a:1", "b:1")
    if falls_behind:
        commit(story, "b:1", "behind:b:1:1", 2, behind=True)
    story.start("c:1")
    story.quorum(EVENTS, 1, 2, "b:1", "c:1")
    commit(story, "c:1", 2, 2)
    assert rules(story).keys() == (set() if falls_behind else {"one_quorum"})


def test_a_group_that_took_part_behind_and_has_the_lineage_of_others_is_found() -> None:
    story = behind()
    commit(story, "b:1", 1, 2, behind=True)
    assert set(rules(story)) == {"one_state"}


def test_groups_that_were_made_equal_go_on_together() -> None:
    story = behind()
    commit(story, "b:1", "behind:b:1:1", 2, behind=True)
    commit(story, "a:1", 1, 2)
    commit(story, "a:1", "synchronized:1", 2, synchronized=True)
    commit(story, "b:1", "synchronized:1", 2, synchronized=True, behind=True, step=3)
    story.logs["b:1.jsonl"][-1]["step"] = 3
    story.commit("a:1", "b:1")
    story.commit("a:1", "b:1")
    assert not rules(story)


def test_groups_of_which_one_did_not_say_that_they_are_equal_do_not() -> None:
    story = behind()
    commit(story, "b:1", "synchronized:1", 2, synchronized=True, behind=True)
    story.commit("a:1", "b:1")
    assert set(rules(story)) == {"one_state"}
