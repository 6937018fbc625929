"""What ``keepstep check-history`` finds: a small valid history, and a fault planted in it for each rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keepstep_cli.history import History, Report
from keepstep_cli.history_jobs import JobHistory
from keepstep_cli.history_records import Place, StepRecord, parse
from keepstep_cli.history_rules import KEPT_PER_RULE, RULES, Violations
from simulation.history import EVENTS, report_on
from simulation.simulator import Simulation

Line = dict[str, Any]


class Story:
    """Logs as lists of lines that can be changed. Numbers of lines and of events are made at the end (``numbered``)."""

    def __init__(self) -> None:
        self.logs: dict[str, list[Line]] = {}
        self.held: dict[str, tuple[int, int | str]] = {}
        """(step, lineage) of each incarnation."""
        self.answer: dict[str, tuple[int, int]] = {}

    def event(self, log: str, epoch: int, kind: str, replica_id: str = "", **detail: Any) -> Line:
        line = {"job": "" if kind == "term" else "job", "epoch": epoch, "kind": kind, "replica_id": replica_id}
        return self.add(log, line | {"detail": detail})

    def quorum(self, log: str, epoch: int, quorum_id: int, *members: str) -> Line:
        """Made by the lighthouse, and its members, as far as they have started, hear of it."""
        line = self.event(log, epoch, "quorum", quorum_id=quorum_id, members=list(members))
        self.join(epoch, quorum_id, *members)
        return line

    def join(self, epoch: int, quorum_id: int, *members: str) -> None:
        for who in members:
            if who in self.held:
                self.answer[who] = epoch, quorum_id
                self.step(who, "quorum", members=list(members), participants=len(members))

    def start(self, *names: str) -> None:
        for who in names:
            self.held[who] = 0, who
            self.step(who, "started", lineage=who)

    def heal(self, who: str, source: str) -> None:
        self.held[who] = self.held[source]
        self.step(who, "healed", lineage=self.held[who][1])

    def commit(self, *names: str, participants: int = 0) -> None:
        for who in names:
            step, lineage = self.held[who]
            self.held[who] = step + 1, self.answer[who][1]
            self.step(who, "committed", lineage=lineage, participants=participants or len(names))

    def step(self, who: str, event: str, **detail: Any) -> Line:
        epoch, quorum_id = self.answer.get(who, (0, 0))
        line = {"job": "job", "replica_id": who, "group_rank": 0, "event": event, "step": self.held[who][0]}
        return self.add(f"{who}.jsonl", line | {"epoch": epoch, "quorum_id": quorum_id} | detail)

    def add(self, log: str, line: Line) -> Line:
        self.logs.setdefault(log, []).append(line)
        return line

    def find(self, log: str, **facts: Any) -> Line:
        """The one line of ``log`` with these facts, in its detail too."""
        (found,) = [one for one in self.logs[log] if facts.items() <= ({**one, **one.get("detail", {})}).items()]
        return found

    def numbered(self) -> dict[str, list[str]]:
        """Numbers what has no number yet."""
        for lines in self.logs.values():
            last = 0
            for count, line in enumerate(lines, 1):
                if "kind" in line:
                    last = line.setdefault("id", max(last, line["epoch"] << 32) + 1)
                else:
                    line.setdefault("n", count)
        return {log: [json.dumps(line) for line in lines] for log, lines in self.logs.items()}

    def place(self, line: Line) -> str:
        (found,) = [f"{log}:{i}" for log, lines in self.logs.items() for i, one in enumerate(lines, 1) if one is line]
        return found


def valid() -> Story:
    """Two lighthouses, one after the other; a is killed and comes back as a:2, which is evicted in the end."""
    story = Story()
    story.event("l1.jsonl", 1, "term", owner="one")
    story.start("a:1", "b:1")
    story.quorum("l1.jsonl", 1, 1, "a:1", "b:1")
    story.heal("b:1", "a:1")
    for _ in range(3):
        story.commit("a:1", "b:1")
    story.commit("a:1", participants=2)  # and is killed: b never saw the end of step 4
    story.step("b:1", "discarded")
    story.quorum("l1.jsonl", 1, 2, "b:1")
    story.commit("b:1")
    story.commit("b:1")
    story.event("l2.jsonl", 2, "term", owner="two")
    story.join(2, 2, "b:1")
    story.commit("b:1")
    story.start("a:2")
    story.quorum("l2.jsonl", 2, 3, "a:2", "b:1")
    story.heal("a:2", "b:1")
    story.commit("a:2", "b:1", participants=1)
    story.commit("a:2", "b:1")
    story.event("l2.jsonl", 2, "evicted", "a", incarnations=["a:2"], quorum_id=3)
    story.quorum("l2.jsonl", 2, 4, "b:1")
    story.commit("b:1")
    return story


def test_a_valid_history_has_no_violation_and_is_summed_up() -> None:
    report = report_on(valid().numbered())
    assert report.fine, report.violations
    assert (report.event_logs, report.step_logs, report.epochs, report.not_covered) == (2, 3, 2, [])
    job = report.jobs["job"]
    assert (job.groups, job.incarnations, job.quorums, job.epochs) == (2, 3, 4, 2)
    assert (job.steps, job.steps_again) == (9, 1)


# ---- one fault each: changes the story, gives the lines that prove it


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


# ---- what is no violation


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


def test_a_leader_that_raises_its_epoch_is_one_owner() -> None:
    story = valid()
    two_leaders_for_one_step(story)
    assert "one_answer" in report_on(story.numbered()).counts
    story.find("l3.jsonl", kind="term")["detail"]["owner"] = "two"
    assert report_on(story.numbered()).fine


# ---- what is not there


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


# ---- lines that are no records


def read(*lines: bytes | Line, whole: bool = True) -> Report:
    history = History()
    history.begin_file(EVENTS)
    for number, line in enumerate(lines, 1):
        place = Place(EVENTS, number)
        if isinstance(line, bytes):
            history.unreadable(place, "it is not JSON", whole=whole or number < len(lines))
        else:
            history.add(place, parse(json.dumps(line).encode()))
    return history.report()


def term(epoch: int) -> Line:
    line = {"id": (epoch << 32) + 1, "epoch": epoch, "job": "", "kind": "term", "replica_id": ""}
    return line | {"detail": {"owner": f"one {epoch}"}}


def test_a_line_that_is_no_record_is_a_violation() -> None:
    (found,) = read(term(1), b"{", {**term(1), "id": term(1)["id"] + 1, "kind": "joined"}).violations
    assert (found.rule, [str(place) for place in found.records]) == ("unreadable", [f"{EVENTS}:2"])
    assert not read(term(1), b"{").fine


def test_a_line_that_a_kill_cut_off_is_none() -> None:
    for report in (read(term(1), b"{", whole=False), read(term(1), b"{", term(2))):
        assert report.fine
        assert any(f"{EVENTS}:2 is cut off" in sentence for sentence in report.not_covered)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"\xff", "not JSON"),
        (b"[]", "no event log and no step log"),
        (b'{"event": "committed"}', "no event log and no step log"),
        (b'{"n": 1, "event": "danced"}', "no event 'danced'"),
        (b'{"n": true, "event": "discarded", "job": "j", "replica_id": "a", "group_rank": 0}', "'n' is True"),
        (b'{"id": 1, "kind": "quorum", "detail": []}', "'detail' is missing"),
        (b'{"id": 1, "kind": "quorum", "detail": {}}', "'id' is 1"),
        (b'{"id": 1, "epoch": -1, "kind": "joined", "detail": {}}', "'epoch' is -1"),
    ],
)
def test_a_line_of_no_log_says_why(line: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why if "'id'" not in why else "'epoch' is None"):
        parse(line)


def test_many_violations_of_one_rule_are_counted_and_the_first_are_told() -> None:
    report = read(term(1), *[b"{"] * 100)
    assert report.counts["unreadable"] == 100
    assert len(report.violations) == KEPT_PER_RULE


def test_memory_grows_with_quorums_not_with_steps() -> None:
    violations = Violations()
    history = JobHistory("job", violations)
    process = history.process("a:1", 0)
    for n in range(1, 5001):
        event, quorum_id = ("quorum" if n % 1000 == 1 else "committed"), 1 + (n - 1) // 1000
        step = n - quorum_id
        lineage = 1 + (n - 2) // 1000 if n % 1000 != 2 else quorum_id - 1
        line = {"job": "job", "replica_id": "a:1", "group_rank": 0, "n": n, "event": event, "step": step}
        line |= {"epoch": 1, "quorum_id": quorum_id, "lineage": lineage, "participants": 1, "members": ["a:1"]}
        record = parse(json.dumps(line).encode())
        assert isinstance(record, StepRecord)
        process.add(Place("a.jsonl", n), record)
    history.check({})
    assert not violations.counts
    assert [(run.quorum_id, run.first, run.last) for run in process.runs] == [
        (quorum_id, 999 * (quorum_id - 1) + 1, 999 * quorum_id) for quorum_id in range(1, 6)
    ]
    assert len(history.quorums.by_id) == 5


# ---- histories of the simulator: the real core and the real plan under faults


def simulated(seed: int) -> dict[str, list[str]]:
    simulation = Simulation(seed)
    simulation.run()  # checks its own history
    return simulation.logs.lines


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.data())
def test_a_line_taken_out_of_a_history_is_missed(seed: int, data: st.DataObject) -> None:
    logs = simulated(seed)
    name = data.draw(st.sampled_from(sorted(name for name, lines in logs.items() if len(lines) > 2)))
    line = data.draw(st.integers(1, len(logs[name]) - 2))
    assume('"term"' not in logs[name][line + 1])  # the last before a kill may never have been written
    report = report_on({**logs, name: [*logs[name][:line], *logs[name][line + 1 :]]})
    assert "gap" in report.counts


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.data())
def test_a_commit_that_is_changed_is_found(seed: int, data: st.DataObject) -> None:
    logs = simulated(seed)
    commits = [(name, i) for name, lines in logs.items() for i, one in enumerate(lines) if '"committed"' in one]
    assume(commits)
    name, place = data.draw(st.sampled_from(commits))
    line = json.loads(logs[name][place])
    fact = data.draw(st.sampled_from(["step", "quorum_id", "epoch", "lineage", "n"]))
    value = data.draw(st.integers(0, 1000).filter(lambda value: value != line[fact]))
    changed = [*logs[name][:place], json.dumps({**line, fact: value}), *logs[name][place + 1 :]]
    assert not report_on({**logs, name: changed}).fine, (fact, value)
