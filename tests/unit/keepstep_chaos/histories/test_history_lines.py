"""Lines one by one: what is no record, what a kill cut off, and what is kept of very many."""

from __future__ import annotations

import json

import pytest

from keepstep_chaos.histories.history import History, Report
from keepstep_chaos.histories.jobs import JobHistory
from keepstep_chaos.histories.records import Place, StepRecord, parse
from keepstep_chaos.histories.rules import KEPT_PER_RULE, Violations
from tests.simulation.checks.history import EVENTS
from tests.unit.keepstep_chaos.histories.history_story import Line


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
        (b"\xff", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b"[]", "no event log and no step log"),
        (b'{"event": "committed"}', "no event log and no step log"),
        (b'{"n": 1, "event": "danced"}', "unknown event 'danced'"),
        (b'{"n": true, "event": "discarded", "job": "j", "replica_id": "a", "group_rank": 0}', "invalid 'n' True"),
        (b'{"id": 1, "kind": "quorum", "detail": []}', "'detail' is missing"),
        (b'{"id": 1, "kind": "quorum", "detail": {}}', "invalid 'epoch' None"),
        (b'{"id": 1, "epoch": -1, "kind": "joined", "detail": {}}', "invalid 'epoch' -1"),
    ],
)
def test_a_line_of_no_log_says_why(line: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
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
