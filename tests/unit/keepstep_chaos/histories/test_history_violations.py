"""Every violation is found: one fault for each rule, planted in a valid history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep_chaos.histories.rules import RULES
from tests.simulation.checks.history import report_on
from tests.unit.keepstep_chaos.histories.history_story import Line, Story, valid


def another_membership_at_a_group(story: Story) -> list[Line]:
    line = story.find("b:1.jsonl", event="quorum", quorum_id=3)
    line["members"] = ["b:1", "c:1"]
    return [story.find("a:2.jsonl", event="quorum", quorum_id=3), line]


def another_membership_at_a_second_lighthouse(story: Story) -> list[Line]:
    story.event("l0.jsonl", 3, "term", owner="three")
    line = story.event("l0.jsonl", 3, "quorum", quorum_id=4, members=["c:1"])
    return [story.find("l2.jsonl", kind="quorum", quorum_id=4), line]


def the_same_quorum_made_twice(story: Story) -> list[Line]:
    story.event("l3.jsonl", 3, "term", owner="three")
    line = story.event("l3.jsonl", 3, "quorum", quorum_id=4, members=["b:1"])
    return [story.find("l2.jsonl", kind="quorum", quorum_id=4), line]


def two_owners_of_an_epoch(story: Story) -> list[Line]:
    return [story.find("l2.jsonl", kind="term"), story.event("l3.jsonl", 2, "term", owner="three")]


def an_epoch_that_falls_in_an_event_log(story: Story) -> list[Line]:
    line = story.event("l2.jsonl", 1, "joined", "c:1")
    return [story.find("l2.jsonl", quorum_id=4), line]


def an_epoch_that_falls_at_a_group(story: Story) -> list[Line]:
    line = story.find("b:1.jsonl", event="quorum", quorum_id=2, epoch=2)
    line["epoch"] = 0
    return [line]


def a_quorum_id_that_falls_in_an_event_log(story: Story) -> list[Line]:
    line = story.event("l2.jsonl", 2, "quorum", quorum_id=0, members=["b:1"])
    return [story.find("l2.jsonl", kind="quorum", quorum_id=4), line]


def a_quorum_id_that_falls_at_a_group(story: Story) -> list[Line]:
    line = story.step("b:1", "discarded")
    line["quorum_id"] = 3
    return [line]


def a_quorum_made_under_an_old_epoch(story: Story) -> list[Line]:
    line = story.event("l1.jsonl", 1, "quorum", quorum_id=5, members=["c:1"])
    return [story.find("l2.jsonl", kind="quorum", quorum_id=4), line]


def an_answer_under_an_old_epoch(story: Story) -> list[Line]:
    story.held["c:1"] = 0, "c:1"
    story.answer["c:1"] = 1, 4
    return [story.find("l2.jsonl", kind="quorum", quorum_id=4), story.step("c:1", "discarded")]


def an_eviction_under_an_old_epoch(story: Story) -> list[Line]:
    line = story.event("l1.jsonl", 1, "evicted", "c", incarnations=["c:1"], quorum_id=4)
    return [story.find("l2.jsonl", kind="quorum", quorum_id=4), line]


def a_return_under_an_old_epoch(story: Story) -> list[Line]:
    line = story.event("l1.jsonl", 1, "readmitted", "c", quorum_id=4)
    return [story.find("l2.jsonl", kind="quorum", quorum_id=4), line]


def a_policy_under_an_old_epoch(story: Story) -> list[Line]:
    line = story.event("l1.jsonl", 1, "policy", quorum_id=4)
    return [story.find("l2.jsonl", kind="quorum", quorum_id=4), line]


def a_step_that_a_member_of_the_quorum_had_already(story: Story) -> list[Line]:
    for log in ("l1.jsonl", "b:1.jsonl"):
        for line in story.logs[log]:
            if line.get("quorum_id", line.get("detail", {}).get("quorum_id")) == 2:
                detail = line.get("detail", line)
                detail.update({"members": ["a:1", "b:1"]} if "members" in detail else {})
    return [story.find("a:1.jsonl", step=4), story.find("b:1.jsonl", event="committed", step=4)]


def other_participants(story: Story) -> list[Line]:
    line = story.find("a:2.jsonl", event="committed", step=8)
    line["participants"] = 1
    return [line, story.find("b:1.jsonl", event="committed", step=8)]


def more_participants_than_members(story: Story) -> list[Line]:
    line = story.find("b:1.jsonl", event="committed", step=9)
    line["participants"] = 2
    return [line]


def no_participants(story: Story) -> list[Line]:
    line = story.find("b:1.jsonl", event="committed", step=9)
    line["participants"] = 0
    return [line]


def two_leaders_for_one_step(story: Story) -> list[Line]:
    story.event("l3.jsonl", 3, "term", owner="three")
    line = story.find("a:2.jsonl", event="committed", step=8)
    line["epoch"] = 3
    story.logs["a:2.jsonl"].insert(-1, {**story.find("a:2.jsonl", event="quorum"), "epoch": 3})
    return [line, story.find("b:1.jsonl", event="committed", step=8)]


def a_group_with_other_weights_trains_along(story: Story) -> list[Line]:
    for line in story.logs["a:2.jsonl"]:
        if line["event"] == "healed" or (line["event"] == "committed" and line["step"] == 7):
            line["lineage"] = 1
    return [line for line in (*story.logs["a:2.jsonl"], *story.logs["b:1.jsonl"]) if line["step"] == 7]


def a_state_that_is_not_the_one_committed(story: Story) -> list[Line]:
    line = story.find("b:1.jsonl", event="committed", step=9)
    line["lineage"] = 2
    return [line]


def groups_that_finish_apart(story: Story) -> list[Line]:
    return [story.step(who, "finished", lineage=who, closed_ms=1) for who in ("a:2", "b:1")]


def a_step_left_out(story: Story) -> list[Line]:
    line = story.find("b:1.jsonl", event="committed", step=9)
    line["step"] = 10
    return [line]


def a_step_counted_twice(story: Story) -> list[Line]:
    line = story.find("b:1.jsonl", event="committed", step=9)
    line["step"] = 8
    return [line]


def a_commit_under_a_quorum_of_others(story: Story) -> list[Line]:
    line = story.find("b:1.jsonl", event="quorum", quorum_id=4)
    line["members"] = story.find("l2.jsonl", kind="quorum", quorum_id=4)["detail"]["members"] = ["a:2"]
    return [line]


def a_commit_under_a_quorum_that_the_lighthouse_made_of_others(story: Story) -> list[Line]:
    story.numbered()
    made = story.find("l2.jsonl", kind="quorum", quorum_id=4)
    made["detail"]["members"] = ["c:1"]
    del story.logs["b:1.jsonl"][:-1]
    return [made, story.find("b:1.jsonl", event="committed", step=9)]


def a_commit_under_a_quorum_that_it_is_not_in_yet(story: Story) -> list[Line]:
    line = story.find("b:1.jsonl", event="committed", step=9)
    story.logs["b:1.jsonl"].remove(story.find("b:1.jsonl", event="quorum", quorum_id=4))
    return [line]


def a_commit_before_any_quorum(story: Story) -> list[Line]:
    story.logs["a:2.jsonl"].remove(story.find("a:2.jsonl", event="quorum"))
    return [story.find("a:2.jsonl", event="committed", step=7)]


def an_evicted_group_in_a_quorum(story: Story) -> list[Line]:
    line = story.event("l2.jsonl", 2, "quorum", quorum_id=5, members=["a:2", "b:1"])
    return [story.find("l2.jsonl", kind="evicted"), line]


def a_commit_of_an_evicted_group(story: Story) -> list[Line]:
    story.join(2, 5, "a:2")
    story.commit("a:2")
    return [story.find("l2.jsonl", kind="evicted"), story.logs["a:2.jsonl"][-1]]


def an_event_is_missing(story: Story) -> list[Line]:
    story.numbered()
    story.logs["l2.jsonl"].remove(story.find("l2.jsonl", kind="quorum", quorum_id=3))
    return [story.find("l2.jsonl", kind="term"), story.find("l2.jsonl", kind="evicted")]


def a_step_record_is_missing(story: Story) -> list[Line]:
    story.numbered()
    story.logs["b:1.jsonl"].remove(story.find("b:1.jsonl", event="discarded"))
    return [story.find("b:1.jsonl", event="quorum", quorum_id=2, epoch=1)]


PLANTED: list[tuple[str, Callable[[Story], list[Line]]]] = [
    ("one_membership", another_membership_at_a_group),
    ("one_membership", another_membership_at_a_second_lighthouse),
    ("one_membership", the_same_quorum_made_twice),
    ("one_owner", two_owners_of_an_epoch),
    ("epoch_order", an_epoch_that_falls_in_an_event_log),
    ("epoch_order", an_epoch_that_falls_at_a_group),
    ("quorum_order", a_quorum_id_that_falls_in_an_event_log),
    ("quorum_order", a_quorum_id_that_falls_at_a_group),
    ("old_epoch", a_quorum_made_under_an_old_epoch),
    ("old_epoch", an_answer_under_an_old_epoch),
    ("old_epoch", an_eviction_under_an_old_epoch),
    ("old_epoch", a_return_under_an_old_epoch),
    ("old_epoch", a_policy_under_an_old_epoch),
    ("one_quorum", a_step_that_a_member_of_the_quorum_had_already),
    ("one_answer", other_participants),
    ("one_answer", more_participants_than_members),
    ("one_answer", no_participants),
    ("one_answer", two_leaders_for_one_step),
    ("one_state", a_group_with_other_weights_trains_along),
    ("one_state", a_state_that_is_not_the_one_committed),
    ("one_end", groups_that_finish_apart),
    ("step_order", a_step_left_out),
    ("step_order", a_step_counted_twice),
    ("member", a_commit_under_a_quorum_of_others),
    ("member", a_commit_under_a_quorum_that_the_lighthouse_made_of_others),
    ("member", a_commit_under_a_quorum_that_it_is_not_in_yet),
    ("member", a_commit_before_any_quorum),
    ("evicted", an_evicted_group_in_a_quorum),
    ("evicted", a_commit_of_an_evicted_group),
    ("gap", an_event_is_missing),
    ("gap", a_step_record_is_missing),
]


@pytest.mark.parametrize(("rule", "plant"), PLANTED, ids=[plant.__name__ for _, plant in PLANTED])
@pytest.mark.parametrize("reverse", [False, True], ids=["", "files in reverse order"])
def test_a_planted_violation_is_found_named_and_proved(
    rule: str, plant: Callable[[Story], list[Line]], *, reverse: bool
) -> None:
    story = valid()
    proof = plant(story)
    logs = story.numbered()
    report = report_on(dict(reversed(logs.items())) if reverse else logs)
    found = [one for one in report.violations if one.rule == rule]
    assert found, report.violations
    places = [{str(place) for place in one.records} for one in found]
    assert any({story.place(line) for line in proof} <= one for one in places), places


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _ in PLANTED} | {"unreadable"} == set(RULES)


def test_a_leader_that_raises_its_epoch_is_one_owner() -> None:
    story = valid()
    two_leaders_for_one_step(story)
    assert "one_answer" in report_on(story.numbered()).counts
    story.find("l3.jsonl", kind="term")["detail"]["owner"] = "two"
    assert report_on(story.numbered()).fine
