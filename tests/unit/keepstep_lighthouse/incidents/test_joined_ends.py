"""Facts of the lighthouse and of the launcher about an end become one incident, in any order."""

from __future__ import annotations

from typing import Any

from keepstep_lighthouse.incidents.joined_ends import LAUNCHER_SECONDS, LEAVING_SECONDS, Incident, Incidents
from keepstep_lighthouse.incidents.judgement import Report
from keepstep_lighthouse.incidents.listing import KIND, listed
from keepstep_lighthouse.jobs.event_log import Happened
from keepstep_lighthouse.quorum.presence.departures import CLOSED, EVICTED, SILENT
from keepstep_mesh.protocol.names import name_of

HOSTS = {"r0": "h0", "r1": "h1", "r2": "h1"}


class World:
    """Incidents with their own clock, and r0 on h0, r1 and r2 on h1."""

    def __init__(self, *here: str) -> None:
        self.core = Incidents(lambda replica_id: HOSTS.get(name_of(replica_id), ""))
        self.now = 100.0
        self.found: list[Incident] = []
        for one in here:
            self.happens("joined", one)

    def happens(self, kind: str, replica_id: str, **detail: Any) -> None:
        self.found += self.core.note(kind, replica_id, detail, (), self.now, 1000 + self.now)

    def lost(self, replica_id: str, how: str = CLOSED) -> None:
        self.happens("lost", replica_id, how=how, reason=f"lost {how}")

    def told(self, replica_id: str, code: int = 1, **facts: Any) -> None:
        self.found += self.core.report(Report(replica_id, 0, code, **facts), self.now, 1000 + self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.found += self.core.decide_due(self.now)

    @property
    def verdicts(self) -> list[tuple[str, str]]:
        return [(one.replica_id, one.detail["verdict"]) for one in self.found]


def test_a_loss_waits_for_its_launcher() -> None:
    world = World("r1:a")
    world.lost("r1:a")
    assert world.core.deadline() == 100 + LAUNCHER_SECONDS
    world.told("r1:a", 3, log="bye", host="the-host")
    assert world.verdicts == [("r1:a", "script")]
    assert (world.found[0].detail["code"], world.found[0].detail["host"], world.found[0].log) == (3, "the-host", "bye")
    world.passes(60)
    assert len(world.found) == 1


def test_a_report_waits_for_the_loss_if_its_group_is_connected() -> None:
    world = World("r1:a")
    world.told("r1:a", 1)
    assert world.found == []
    world.passes(5)
    world.lost("r1:a", SILENT)
    assert world.verdicts == [("r1:a", "network")]
    assert world.found[0].detail["at"] == 1100


def test_without_a_launcher_the_lighthouse_decides() -> None:
    world = World("r1:a")
    world.lost("r1:a")
    world.passes(LAUNCHER_SECONDS - 1)
    assert world.found == []
    world.passes(1)
    assert world.verdicts == [("r1:a", "unknown")]
    assert world.found[0].detail["host"] == "h1"


def test_a_group_that_never_connected_is_decided_at_once_and_each_time() -> None:
    world = World("r0:a")
    world.told("r1", 85, said="its disk is full")
    world.passes(60)
    world.told("r1", 85, said="its disk is full")
    assert world.verdicts == [("r1", "machine")] * 2
    assert [one.detail["at"] for one in world.found] == [1100, 1160]


def test_a_later_refusal_of_a_group_is_not_taken_for_the_end_of_its_last_process() -> None:
    world = World("r1:a")
    world.lost("r1:a", SILENT)
    world.passes(LAUNCHER_SECONDS)
    world.passes(600)
    world.told("r1", 85, said="its disk is full")
    assert world.verdicts == [("r1:a", "machine"), ("r1", "machine")]
    assert world.found[1].detail["code"] == 85


def test_a_report_that_the_network_delayed_replaces_the_incident() -> None:
    world = World("r1:a")
    world.lost("r1:a", SILENT)
    world.passes(LAUNCHER_SECONDS)
    world.passes(300)
    world.told("r1:a", 1, seconds_ago=290)
    assert world.verdicts == [("r1:a", "machine"), ("r1:a", "network")]
    assert len({one.detail["at"] for one in world.found}) == 1


def test_a_silent_group_that_comes_back_was_cut_off() -> None:
    world = World("r1:a")
    world.lost("r1:a", SILENT)
    world.passes(4)
    world.happens("joined", "r1:a")
    assert world.verdicts == [("r1:a", "network")]
    world.lost("r1:a")
    world.told("r1:a", -9)
    assert world.verdicts[1:] == [("r1:a", "unknown")], "it ended later, which is another incident"
    assert world.found[0].detail["at"] != world.found[1].detail["at"]


def test_a_loss_that_a_new_lighthouse_notices_after_the_report_is_the_same_end() -> None:
    world = World()
    world.told("r1:a", -9)
    world.passes(5)
    world.lost("r1:a")
    assert [one.detail["at"] for one in world.found] == [1100, 1100]


def test_the_next_incarnation_is_not_taken_for_the_one_that_ended() -> None:
    world = World("r1:a")
    world.lost("r1:a")
    world.happens("joined", "r1:b")
    world.told("r1:a", 1)
    assert world.verdicts == [("r1:a", "script")]
    world.passes(60)
    assert len(world.found) == 1


def test_ends_that_were_ordered_are_no_incidents() -> None:
    world = World("r0:a", "r1:a", "r2:a")
    world.lost("r0:a", EVICTED)
    world.happens("drain", "r1:a", by="ann")
    world.happens("left", "r1:a", cause="drained", reason="new cable")
    world.happens("left", "r2:a", cause="stopped", reason="SIGTERM")
    world.told("r2:a", 0, stopped_by="SIGINT")
    world.happens("joined", "r2:b")
    world.happens("left", "r2:b", cause="finished", reason="shutdown")
    world.passes(60)
    assert world.found == []


def test_an_order_that_a_slow_launcher_reports_late_takes_the_incident_back() -> None:
    world = World("r1:a")
    world.happens("left", "r1:a", cause="stopped", reason="SIGTERM")
    world.passes(LAUNCHER_SECONDS)
    assert world.found == [], "its process may still have to end"
    world.passes(LEAVING_SECONDS)
    assert world.verdicts == [("r1:a", "preemption")]
    world.told("r1:a", 0, stopped_by="SIGINT")
    entries = [Happened(at, 0.0, "job", 1, KIND, one.replica_id, one.detail) for at, one in enumerate(world.found)]
    assert listed(entries[:1])
    assert listed(entries) == []


def test_a_group_that_is_kept_out_is_an_incident() -> None:
    world = World("r1:a")
    world.happens("parted", "r1", cause="cut", reason="r1 and r0 cannot reach each other")
    assert world.verdicts == [("r1", "network")]
    assert world.found[0].detail["host"] == "h1"


def test_a_machine_whose_other_group_lives_is_not_blamed() -> None:
    world = World("r1:a", "r2:a")
    world.lost("r1:a", SILENT)
    world.passes(LAUNCHER_SECONDS)
    assert world.verdicts == [("r1:a", "unknown")]


def test_a_machine_on_which_groups_crash_again_and_again_is_blamed() -> None:
    world = World("r0:a")
    for incarnation in "abc":
        world.happens("joined", f"r1:{incarnation}")
        world.lost(f"r1:{incarnation}")
        world.told(f"r1:{incarnation}", -11)
    assert [verdict for _, verdict in world.verdicts] == ["script", "script", "machine"]
