"""Reports of a rank on its shard: when they are sent, and what they say."""

from __future__ import annotations

import pytest

from keepstep.one_copy.core.holding import State
from keepstep.one_copy.core.recovery_plan import Kind, Recovery
from keepstep.one_copy.core.world import Seat, World
from keepstep.one_copy.reporting import shard_reports
from keepstep.one_copy.reporting.shard_reports import ShardReports
from keepstep_mesh.protocol.messages import Exposure, ShardReport


class Reported:
    """The reports of rank 0 of member b, in a world of a, b and c with two ranks each."""

    def __init__(self) -> None:
        self.sent: list[ShardReport] = []
        self.refused: dict[str, str] = {}
        self.kept = 100
        self.reports = ShardReports(
            "b", 0, self.sent.append, exposed=lambda: self.refused, copies_bytes=lambda: self.kept, copies=1
        )

    def recovers(self, kind: Kind, *names: str, fills: tuple[tuple[int, int], ...] = ()) -> ShardReport:
        world = World(7, 9, tuple(Seat(one, one) for one in names), 2)
        before = World(7, 7, (Seat("a", "a"), Seat("b", "b")), 2)
        recovery = Recovery(kind, world, before, State(4, "7"), fills=fills)
        self.reports.recovered(recovery, 4, 0.5)
        return self.sent[-1]


@pytest.fixture
def one() -> Reported:
    return Reported()


def test_a_recovery_is_reported_with_seat_keepers_and_numbers_of_ranks(one: Reported) -> None:
    assert one.recovers(Kind.RESIZED, "a", "b", "c") == ShardReport(
        9, 1, 6, 4, "resized", 4, 0.5, 100, ("c",), formed=True, keeps=("a",)
    )


def test_a_member_tells_of_which_others_it_has_copies_when_all_ranks_have_some(one: Reported) -> None:
    assert one.recovers(Kind.REPLACED, "a", "b", "c").keeps == ()
    one.reports.committed(covered=False)
    assert len(one.sent) == 1
    one.reports.committed(covered=True)
    assert one.sent[-1].keeps == ("a",)
    one.reports.committed(covered=False)
    assert one.sent[-1].keeps == ()


def test_a_rank_whose_keeper_is_new_is_exposed_until_the_next_commit(one: Reported) -> None:
    told = one.recovers(Kind.REPLACED, "a", "b", "c", fills=((2, 4),))
    assert told.exposed == (Exposure("c", "they are on their way"),)
    one.reports.committed(covered=True)
    assert one.sent[-1].exposed == ()
    assert not one.sent[-1].formed
    one.reports.committed(covered=True)
    assert len(one.sent) == 2, "nothing has changed"


def test_a_keeper_that_refuses_exposes_the_rank_which_then_may_not_leave(one: Reported) -> None:
    one.refused = {"c": "no memory"}
    assert one.recovers(Kind.FRESH, "a", "b", "c").exposed == (Exposure("c", "no memory"),)
    assert not one.reports.covered
    one.refused = {}
    one.reports.committed(covered=True)
    assert one.sent[-1].exposed == ()
    assert one.reports.covered


def test_the_only_member_is_exposed_and_may_leave(one: Reported) -> None:
    assert one.recovers(Kind.RESIZED, "b").exposed == shard_reports.ALONE
    one.reports.committed(covered=True)
    assert len(one.sent) == 1
    assert one.reports.covered


def test_a_report_is_repeated_for_a_lighthouse_that_took_over(one: Reported, monkeypatch: pytest.MonkeyPatch) -> None:
    one.recovers(Kind.FRESH, "a", "b", "c")
    one.kept = 200
    one.reports.committed(covered=True)
    assert len(one.sent) == 1
    monkeypatch.setattr(shard_reports, "REPEAT_SECONDS", 0.0)
    one.reports.committed(covered=True)
    assert (one.sent[-1].copies_bytes, one.sent[-1].formed) == (200, False)


def test_lost_shards_are_reported_with_their_step(one: Reported) -> None:
    one.reports.lost(9, 4)
    assert (one.sent[-1].how, one.sent[-1].step, one.sent[-1].went_back) == ("lost", 4, 4)
