"""Events that belong together become one line, and the marks of the charts."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keepstep_metrics.history.events import Event
from keepstep_metrics.history.findings.incidents import Incident, fold
from keepstep_metrics.history.findings.marks import marks
from keepstep_metrics.history.sentences import sentence


class Log:
    """Events of a job, numbered."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._numbers = itertools.count(1)

    def add(self, t: float, kind: str, name: str = "", **detail: Any) -> Log:
        self.events.append(Event(next(self._numbers), t, kind, name, sentence(kind, name, detail), detail))
        return self

    def quorum(self, t: float, number: int, *members: str) -> Log:
        return self.add(t, "quorum", quorum_id=number, members=[f"{one}:{number}" for one in members])

    @property
    def incidents(self) -> list[Incident]:
        return fold(self.events)


def job_of_three() -> Log:
    log = Log()
    for name in "abc":
        log.add(0, "joined", name)
    return log.quorum(1, 1, "a", "b", "c")


def death_and_return(log: Log) -> Log:
    log.add(10, "suspect", "b").add(10.2, "lost", "b", reason="its connection ended").quorum(10.3, 2, "a", "c")
    log.add(20, "joined", "b").quorum(21, 3, "a", "b", "c")
    return log.add(21, "heal_began", "b", step=5, source="a:1").add(22, "healed", "b", bytes=1 << 20, seconds=0.5)


def test_a_death_and_its_return_are_one_incident() -> None:
    incident = death_and_return(job_of_three()).incidents[-1]
    assert [event.event for event in incident.events] == [
        *("suspect", "lost", "quorum", "joined", "quorum", "heal_began", "healed")
    ]
    assert (incident.kind, incident.name, incident.t, incident.until, incident.away) == ("lost", "b", 10, 22, False)
    assert incident.sentence == (
        "b was lost: its connection ended; next quorum after 0.10 s; connected again after 9.80 s; "
        "in the quorum after 11 s; healed: 1.0 MiB in 0.50 s"
    )


def test_an_error_of_a_script_says_more_than_the_return_after_it() -> None:
    log = job_of_three().add(10, "left", "b", cause="failed", step=5, reason="the script ended with KeyError")
    incident = log.add(20, "joined", "b").add(22, "healed", "b", bytes=1 << 20, seconds=0.5).incidents[-1]
    assert incident.kind == "left"
    assert incident.sentence.startswith(
        "b failed at step 5: the script ended with KeyError; connected again after 10 s"
    )


def test_a_group_that_has_not_come_back_is_away() -> None:
    log = job_of_three().add(10, "lost", "b", reason="killed").quorum(10.1, 2, "a", "c")
    assert [one.name for one in log.incidents if one.away] == ["b"]
    log.add(20, "joined", "b")
    assert not any(one.away for one in log.incidents)


def test_a_round_that_a_death_breaks_belongs_to_it_and_a_reconnect_of_before_does_not() -> None:
    log = job_of_three().add(100, "joined", "b").add(300, "lost", "b", reason="killed")
    log.add(300.1, "round_broken", "a", reason="a did not commit the step").quorum(300.2, 2, "a", "c")
    incident = log.incidents[-1]
    assert [event.event for event in incident.events] == ["lost", "round_broken", "quorum"]
    before = job_of_three().add(300, "round_broken", "a").add(300.1, "lost", "b", reason="killed").incidents[-1]
    assert ([event.event for event in before.events], before.kind) == (["round_broken", "lost"], "lost")
    assert incident.sentence == "b was lost: killed; next quorum after 0.20 s"


def test_two_deaths_at_once_are_two_incidents_with_one_quorum() -> None:
    log = job_of_three().add(10, "lost", "b", reason="x").add(10, "lost", "c", reason="x").quorum(10.1, 2, "a")
    last = log.incidents[-2:]
    assert [(one.name, one.events[-1].event) for one in last] == [("b", "quorum"), ("c", "quorum")]


def test_the_next_death_of_a_group_is_another_incident() -> None:
    log = death_and_return(job_of_three()).add(100, "lost", "b", reason="again").quorum(100.1, 4, "a", "c")
    assert [one.t for one in log.incidents if one.kind == "lost"] == [10, 100]


def test_a_group_that_dies_before_it_is_back_is_one_incident_that_counts() -> None:
    log = job_of_three().add(10, "lost", "b", reason="killed")
    for t in (20, 30):
        log.add(t, "joined", "b").add(t + 1, "lost", "b", reason="killed")
    incident = log.incidents[-1]
    assert "lost again 2 times" in incident.sentence
    assert incident.away


def test_heals_that_fail_again_and_again_are_counted_with_the_last_reason() -> None:
    log = job_of_three().add(10, "lost", "b", reason="killed").add(20, "joined", "b").quorum(21, 2, "a", "b", "c")
    for t in range(22, 36):
        log.add(t, "heal_began", "b", step=5, source="a:1").add(t, "heal_failed", "b", reason=f"no route, try {t}")
    incident = log.incidents[-1]
    assert incident.sentence.endswith("heal failed 14 times: no route, try 35")
    assert len(incident.sentence) < 300


def test_comparisons_without_a_difference_are_one_line() -> None:
    log = job_of_three()
    for t in range(100, 400, 100):
        log.add(t, "replicas_verified", step=t, groups=3)
    assert log.incidents[-1].sentence == (
        "the weights of 3 groups are equal after step 100; replicas verified again 2 times"
    )


def test_orders_and_events_of_the_job_stand_alone() -> None:
    log = job_of_three().add(5, "policy").add(6, "straggler", "a", seconds=1.0, median=0.1).add(7, "nonfinite", "a")
    assert [one.kind for one in log.incidents[-3:]] == ["policy", "straggler", "nonfinite"]


KINDS = st.sampled_from(("joined", "lost", "left", "quorum", "healed", "heal_began", "heal_failed", "drain", "policy"))


@given(st.lists(st.tuples(KINDS, st.sampled_from("abc"), st.sets(st.sampled_from("abc")))))
def test_no_event_is_dropped_and_the_order_is_kept(told: list[tuple[str, str, set[str]]]) -> None:
    log = Log()
    for t, (kind, name, members) in enumerate(told):
        if kind == "quorum":
            log.quorum(t, t, *members)
        else:
            log.add(t, kind, "" if kind == "policy" else name)
    incidents = log.incidents
    assert {event.id for one in incidents for event in one.events} == {event.id for event in log.events}
    assert [one.id for one in incidents] == sorted(one.id for one in incidents)
    assert all([event.id for event in one.events] == sorted({event.id for event in one.events}) for one in incidents)


def test_of_marks_at_one_place_the_most_important_stays() -> None:
    log = death_and_return(job_of_three()).add(50, "went_back", reason="all groups were lost")
    found = [(one.t, one.kind) for one in marks(log.events, 0, 100, 0.5)]
    assert found == [(1, "quorum"), (10.2, "failure"), (21, "quorum"), (22, "heal"), (50, "went_back")]
    assert [(one.kind, one.count) for one in marks(log.events, 0, 100, 1000)] == [("went_back", 1)]


def test_the_partings_of_a_group_are_one_incident_with_the_reason() -> None:
    log, reason = job_of_three(), "b fails by itself: ValueError: bad batch"
    log.add(10, "parted", "b", cause="own", seconds=5.0, times=1, reason=reason).quorum(10.1, 2, "a", "c")
    log.add(15, "let_in", "b", reason="its time is over").quorum(15.1, 3, "a", "b", "c")
    log.add(16, "parted", "b", cause="own", seconds=10.0, times=2, reason=reason).quorum(16.1, 4, "a", "c")
    incident = log.incidents[-1]
    assert (incident.kind, incident.name, len(incident.events)) == ("parted", "b", 6)
    assert incident.sentence.startswith(f"b keeps others from committing and is kept out for 5 s: {reason}; ")
    assert "parted again" in incident.sentence
    assert [one.t for one in marks(log.events, 0, 20, 1.0) if one.kind == "failure"] == [10, 16]
