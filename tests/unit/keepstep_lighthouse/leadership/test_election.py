"""The rules of the election, with time as a number."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.leadership.election import (
    OUTRUN_SECONDS,
    TRY_AGAIN_SECONDS,
    Election,
    Leader,
    Renew,
    StepDown,
    Take,
)
from keepstep_lighthouse.store.contract import StoreError

A, B = Leader("a", "http://a:1", 1).encode(), Leader("b", "http://b:1", 2).encode()
LEASE = 9.0


def leading(at: float = 100.0) -> Election:
    election = Election(LEASE)
    election.heard(None)
    assert election.action(at) == Take(None)
    election.took(A, at)
    return election


def test_nothing_is_done_before_the_store_has_said_who_leads():
    election = Election(LEASE)
    assert election.action(0.0) is None
    assert election.deadline() is None


def test_a_key_that_is_gone_is_taken():
    election = Election(LEASE)
    election.heard(B)
    assert election.action(0.0) is None
    election.heard(None)
    assert election.action(0.0) == Take(None)


def test_a_leader_is_succeeded_when_an_established_link_to_it_breaks_and_not_otherwise():
    election = Election(LEASE)
    election.heard(B)
    election.link_broke(B)  # it never was
    assert election.action(0.0) is None
    election.linked(B)
    assert election.action(0.0) is None
    election.link_broke(B)
    assert election.action(0.0) == Take(B)


def test_a_link_that_is_there_again_saves_the_leader():
    election = Election(LEASE)
    election.heard(B)
    election.linked(B)
    election.link_broke(B)
    election.linked(B)
    assert election.action(0.0) is None


def test_the_broken_link_to_a_former_leader_means_nothing_for_the_next():
    election = Election(LEASE)
    election.heard(A)
    election.linked(A)
    election.link_broke(A)
    election.heard(B)
    assert election.action(0.0) is None


@pytest.mark.parametrize(("outrun", "pause"), [(True, OUTRUN_SECONDS), (False, TRY_AGAIN_SECONDS)])
def test_an_attempt_that_failed_is_made_again_after_a_pause(outrun: bool, pause: float):
    election = Election(LEASE)
    election.heard(None)
    election.not_taken(10.0, outrun=outrun)
    assert election.action(10.0) is None
    assert election.deadline() == 10.0 + pause
    assert election.action(10.0 + pause) == Take(None)


def test_a_leader_renews_at_a_third_and_stops_before_the_end_as_its_own_clock_counts_it():
    election = leading(at=100.0)
    assert election.action(102.9) is None
    assert election.deadline() == pytest.approx(103.0)
    assert election.action(103.0) == Renew()
    election.renewed(103.0)
    assert election.action(105.9) is None
    assert election.action(106.0) == Renew()
    election.not_renewed(106.0)
    assert election.action(106.1) is None
    assert election.action(106.0 + LEASE / 20) == Renew()
    assert isinstance(election.action(103.0 + 0.9 * LEASE), StepDown)


def test_a_renewal_counts_from_when_it_was_sent():
    election = leading(at=100.0)
    election.renewed(101.0)  # answered much later
    assert election.until == pytest.approx(101.0 + 0.9 * LEASE)


@pytest.mark.parametrize("value", [B, None])
def test_a_leader_whose_key_is_not_its_own_any_more_stops_at_once(value: bytes | None):
    election = leading()
    election.heard(value)
    assert isinstance(election.action(100.1), StepDown)


def test_after_stepping_down_only_the_store_tells_the_leader():
    election = leading()
    election.stepped_down(101.0)
    assert not election.leading
    assert election.action(101.0) is None
    election.heard(None)
    assert election.action(101.0) == Take(None)


def test_a_leader_without_workers_leaves_the_key_to_others_for_a_lease():
    election = leading()
    election.stepped_down(101.0, stand_back=True)
    election.heard(None)
    assert election.action(101.0 + LEASE - 0.1) is None
    assert election.action(101.0 + LEASE) == Take(None)


def test_a_leaders_record_comes_back_as_it_was():
    assert Leader.decode(A) == Leader("a", "http://a:1", 1)
    for broken in (b"", b"{}", b"[]", b'{"node": "a"}'):
        with pytest.raises(StoreError, match="leader"):
            Leader.decode(broken)
