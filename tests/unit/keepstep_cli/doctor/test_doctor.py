"""Verdicts of `keepstep doctor` on what it measures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep_cli.doctor import findings
from keepstep_cli.doctor.findings import Probe
from keepstep_mesh.checks.findings import Finding, Verdict

FINE = Probe("relay", "http://r:1", answers_as="relay", round_trip=0.001, clock_offset=0.0, mtu=1500)


def verdicts(found: list[Finding]) -> list[str]:
    return [one.verdict.value for one in found]


def test_members_of_a_model_that_exists_once_need_keepers_on_other_hosts() -> None:
    def member(name: str, host: str, *, member: bool = True, shards: object = "some") -> dict[str, object]:
        return {"name": name, "host": host, "member": member, "shards": shards}

    assert findings.of_copies([member("r0", "a", shards=None), member("r1", "a", shards=None)]) == []
    (alone,) = findings.of_copies([member("r0", "a"), member("r1", "b", member=False)])
    assert (alone.verdict, alone.found) == (Verdict.WARN, "r0 is the only member")
    (together,) = findings.of_copies([member("r0", "a"), member("r1", "a")])
    assert together.verdict is Verdict.WARN
    assert "all 2 members are on the host a" in together.found
    assert verdicts(findings.of_copies([member("r0", "a"), member("r1", "b")])) == ["ok"]
    assert verdicts(findings.of_copies([member("r0", ""), member("r1", "")])) == ["ok"], "hosts are not known"


def test_a_service_that_answers_in_time_is_fine() -> None:
    assert verdicts(findings.of_service(FINE)) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("change", "verdict", "text"),
    [
        ({"problem": "nothing listens there"}, ["fail"], "nothing listens there"),
        ({"answers_as": "metrics"}, ["fail"], "another service answers: metrics"),
        ({"answers_as": ""}, ["fail"], "none of keepstep"),
        ({"round_trip": 0.2}, ["warn", "ok"], "answers in 200 ms"),
        ({"large_problem": "no answer"}, ["ok", "fail", "ok"], "no answer"),
        ({"clock_offset": None}, ["ok"], "answers in 1 ms"),
        ({"clock_offset": -2.0}, ["ok", "warn"], "2 s behind this machine"),
        ({"clock_offset": 90.0}, ["ok", "fail"], "90 s ahead of this machine"),
        ({"not_ready": ""}, ["ok", "ok"], "answers in 1 ms"),
        ({"not_ready": "the disk is full"}, ["ok", "fail", "ok"], "the disk is full"),
        ({"clock_offset": 0.3, "round_trip": 0.4}, ["warn", "ok"], "within 300 ms"),
    ],
)
def test_each_trouble_of_a_service_has_its_verdict(change: dict[str, object], verdict: list[str], text: str) -> None:
    found = findings.of_service(replace(FINE, **change))
    assert verdicts(found) == verdict
    assert any(text in one.found for one in found)
    assert all(one.advice for one in found if one.verdict is not Verdict.OK)


def test_different_mtus_are_a_warning_with_the_addresses() -> None:
    assert findings.of_mtus({}) == []
    assert verdicts(findings.of_mtus({"a": 1500, "b": 1500, "here": 65536})) == ["ok"]
    (found,) = findings.of_mtus({"a": 1500, "b": 9000, "c": 1500})
    assert (found.verdict, found.found) == (Verdict.WARN, "1500: a, c; 9000: b")


def test_a_usual_port_may_be_free_or_have_its_own_service() -> None:
    assert findings.of_port(29510, "lighthouse", "", in_use=False).verdict is Verdict.OK
    assert findings.of_port(29510, "lighthouse", "lighthouse", in_use=True).verdict is Verdict.OK
    assert "another program" in findings.of_port(29510, "lighthouse", "", in_use=True).found
    assert "a relay of keepstep" in findings.of_port(29510, "lighthouse", "relay", in_use=True).found


def group(name: str, runtime: str = "python 3.11, torch 2.9", state: str = "training") -> dict[str, str]:
    return {"name": name, "state": state, "address": f"http://{name}:1", "runtime": runtime}


def test_groups_that_cannot_be_reached_are_named() -> None:
    groups = [group("a"), group("b"), group("c", state="gone")]
    assert verdicts(findings.of_groups(groups, {})) == ["ok"]
    (found,) = findings.of_groups(groups, {"http://b:1": "no route", "http://c:1": "no route"})
    assert (found.check, found.found) == ("group b at http://b:1", "no route")
    assert findings.of_groups([], {}) == []


def test_versions_are_compared_among_groups_and_with_this_machine() -> None:
    here = "python 3.11, torch 2.9"
    assert verdicts(findings.of_versions([group("a"), group("b", "")], here)) == ["ok"]
    assert verdicts(findings.of_versions([], here)) == ["ok"]
    assert "groups differ" in findings.of_versions([group("a"), group("b", "python 3.12")], here)[0].found
    assert "this machine: python 3.9" in findings.of_versions([group("a")], "python 3.9")[0].found
    assert verdicts(findings.of_versions([group("a"), group("b", "python 2", "gone")], here)) == ["ok"]
    assert verdicts(findings.of_versions([group("a", f"{here} on a GPU")], here)) == ["ok"]
    mixed = [group("a", f"{here} on a GPU"), group("b", f"{here} on a CPU")]
    assert verdicts(findings.of_versions(mixed, here)) == ["warn"]


def test_few_open_files_and_no_route_are_warnings() -> None:
    assert verdicts(findings.of_machine(1 << 20, "10.0.0.1")) == ["ok", "ok"]
    assert verdicts(findings.of_machine(1024, "127.0.0.1")) == ["warn", "warn"]
