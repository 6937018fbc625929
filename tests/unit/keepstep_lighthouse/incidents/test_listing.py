"""The list of incidents, and the machines that fail repeatedly."""

from __future__ import annotations

from keepstep_lighthouse.incidents.joined_ends import Incidents
from keepstep_lighthouse.incidents.judgement import Report
from keepstep_lighthouse.incidents.listing import KIND, MAX_LISTED, IncidentView, listed, ranked
from keepstep_lighthouse.jobs.event_log import Happened


def entry(number: int, verdict: str, host: str, *, replica_id: str = "", at: float = 0.0, code: int = -9) -> Happened:
    [found] = Incidents(str).report(Report(replica_id or f"r{number}:a", 0, code, host=host), 0.0, 1000.0 + number)
    detail = found.detail | {"verdict": verdict, "at": at or found.detail["at"]}
    return Happened(number, 0.0, "job", 1, KIND, found.replica_id, detail)


def views(*verdicts_of_hosts: tuple[str, str]) -> list[IncidentView]:
    return listed(entry(number, verdict, host) for number, (host, verdict) in enumerate(verdicts_of_hosts))


def test_the_newest_incident_comes_first_and_other_events_are_left_out() -> None:
    other = Happened(3, 0.0, "job", 1, "joined", "r1:a", {"member": True})
    found = listed([entry(1, "script", "h"), entry(2, "machine", "h"), other])
    assert [(one.id, one.verdict, one.exit) for one in found] == [
        (2, "machine", "was killed by SIGKILL"),
        (1, "script", "was killed by SIGKILL"),
    ]


def test_of_an_incident_that_was_replaced_the_last_form_counts() -> None:
    both = [entry(1, "machine", "h", replica_id="r1:a", at=5.0), entry(2, "network", "h", replica_id="r1:a", at=5.0)]
    assert [(one.id, one.verdict) for one in listed(both)] == [(2, "network")]


def test_the_list_is_bounded() -> None:
    found = views(*[("h", "script")] * (MAX_LISTED + 5))
    assert len(found) == MAX_LISTED
    assert found[0].id == MAX_LISTED + 4


def test_machines_that_fail_repeatedly_are_ranked_by_what_counts_against_them() -> None:
    found = ranked(
        views(
            *[("lost-packets", "network")] * 3,
            *[("bad-gpu", "machine")] * 2,
            *[("strange", "unknown")] * 4,
            *[("buggy-script", "script")] * 9,
            *[("small", "out of memory")] * 9,
            *[("spot", "preemption")] * 9,
            ("once", "machine"),
            ("", "machine"),
            ("", "machine"),
        )
    )
    assert [(one.host, one.failures) for one in found] == [("bad-gpu", 2), ("lost-packets", 3), ("strange", 4)]


def test_a_machine_shows_all_verdicts_on_its_groups() -> None:
    [host] = ranked(views(("h", "machine"), ("h", "machine"), ("h", "script")))
    assert (host.failures, host.verdicts) == (2, {"machine": 2, "script": 1})
