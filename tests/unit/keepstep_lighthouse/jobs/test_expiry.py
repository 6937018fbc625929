"""Which jobs expire: never one that is in use, the longest unused first."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from keepstep_lighthouse.jobs.expiry import NEVER, OVER_SECONDS, JobUse, due_at, expired, next_due, replaceable
from keepstep_lighthouse.quorum.events import Persist
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_mesh.protocol.policy import Policy
from tests.support.models.core_driver import Driver

IDLE = JobUse("idle", ttl=10, sessions=0, used_at=100)
USES = st.builds(
    JobUse,
    job=st.text(min_size=1),
    ttl=st.sampled_from([0.0, 1.0, 50.0]),
    sessions=st.integers(0, 2),
    used_at=st.floats(0, 100),
    awaited=st.booleans(),
)


def test_a_job_expires_its_ttl_after_it_was_last_used() -> None:
    assert expired([IDLE], 109.9) == []
    assert expired([IDLE], 110) == ["idle"]
    assert due_at(IDLE) == next_due([IDLE, replace(IDLE, used_at=105)]) == 110


def test_a_job_with_sessions_never_expires() -> None:
    assert expired([replace(IDLE, sessions=1)], 1e9) == []
    assert due_at(replace(IDLE, sessions=1)) == NEVER


def test_a_job_to_which_groups_may_come_back_does_not_expire() -> None:
    assert expired([replace(IDLE, awaited=True)], 1e9) == []
    assert due_at(replace(IDLE, awaited=True)) == 110, "it is checked anyway"


def test_a_ttl_of_0_is_never() -> None:
    assert expired([replace(IDLE, ttl=0)], 1e9) == []
    assert next_due([]) == NEVER


def test_expired_jobs_make_room_first_then_those_that_are_over_for_an_hour() -> None:
    over = replace(IDLE, job="over", ttl=1e6, over=True)
    uses = [over, replace(over, job="older", used_at=90), replace(IDLE, job="may go on", ttl=1e6)]
    assert replaceable(uses, 99 + OVER_SECONDS) == "older"
    assert replaceable([*uses, IDLE], 100 + OVER_SECONDS) == "idle"
    assert replaceable([replace(IDLE, over=True)], 1e9) == "idle"
    for kept in (replace(over, sessions=1), replace(over, awaited=True), replace(over, ttl=0)):
        assert replaceable([kept], 1e9) is None


@given(st.lists(USES), st.floats(0, 200))
def test_expired_jobs_are_unused_and_in_order(uses: list[JobUse], now: float) -> None:
    found = expired(uses, now)
    ended = [use for use in uses if not use.sessions and not use.awaited and use.ttl and use.used_at + use.ttl <= now]
    assert sorted(found) == sorted(use.job for use in ended)
    times = sorted(use.used_at for use in ended)
    assert [use.used_at for use in sorted(ended, key=lambda use: use.used_at)] == times
    assert all(due_at(use) <= now for use in ended)


def test_the_first_quorum_of_a_job_is_its_first_whatever_its_number() -> None:
    """It begins above the jobs that were deleted, and waits for ``initial_replicas`` like any other."""
    policy = Policy(initial_replicas=2, join_timeout=10)
    lighthouse = Driver(record=JobRecord(quorum_id=58, first_quorum_id=58, policy=policy))
    lighthouse.opens("a")
    assert not [one for one in lighthouse.asks("a") if isinstance(one, Persist)]
    lighthouse.opens("b")
    (persist,) = [one for one in lighthouse.asks("b") if isinstance(one, Persist)]
    assert (persist.record.quorum_id, persist.record.first_quorum_id) == (59, 58)
