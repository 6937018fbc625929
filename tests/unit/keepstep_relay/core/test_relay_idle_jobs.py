"""Checkpoints of jobs that are gone: live states leave the relay, durable ones only if that is asked for."""

from __future__ import annotations

from keepstep_relay.core.checkpoint import NEVER
from keepstep_relay.core.events import ChunkHeld, ChunkReleased, Facts, Forget, Key, Kind, ReadFrom, Tick
from tests.unit.keepstep_relay.core.core_driver import C1, C2, A, B, C, Driver, table


def test_the_last_live_state_of_a_job_goes_when_nobody_used_it_for_its_ttl() -> None:
    relay = Driver(live_ttl_seconds=1000, reading_seconds=60)
    relay.stored(C1, A)
    assert relay.core.deadline() == 1000
    relay(ReadFrom(C1), at=900)
    assert relay(Tick(), at=1900) == []
    assert relay.core.deadline() == 1960
    (forget, *_) = relay(Tick(), at=1960)
    assert forget == Forget(C1, "last live state of job job, unused for 1000 s")
    assert not relay.core.checkpoints
    assert not relay.core.inventory.chunks
    assert relay.core.deadline() == NEVER


def test_all_live_states_of_a_job_go_and_one_that_is_being_sent_when_it_is_let_go() -> None:
    relay = Driver(live_ttl_seconds=1000, reading_seconds=60)
    relay.stored(C1, A, step=1)
    relay.stored(Key("job", "c2"), B, step=2)
    relay(ChunkHeld(B))
    for now in (1060, 1061):
        relay(Tick(), at=now)
    assert not relay.core.checkpoints
    assert set(relay.core.inventory.chunks) == {B}, "its reader has it still"
    relay(ChunkReleased(B))
    assert not relay.core.inventory.chunks


def test_a_durable_checkpoint_stays_whatever_became_of_its_job() -> None:
    relay = Driver(live_ttl_seconds=1000)
    relay.stored(C1, A, kind=Kind.DURABLE)
    assert relay.core.deadline() == NEVER
    assert relay(Tick(), at=10**9) == []
    assert C1 in relay.core.checkpoints


def test_a_ttl_of_0_keeps_the_last_live_state_for_ever() -> None:
    relay = Driver(live_ttl_seconds=0)
    relay.stored(C1, A)
    assert relay.core.deadline() == NEVER


def test_1100_jobs_a_day_apart_leave_one_state() -> None:
    relay = Driver(checkpoints=10, live_ttl_seconds=86_400)
    for number in range(1100):
        relay(Tick(), at=number * 90_000.0)
        relay.stored(Key(f"j{number}", "c"), (A, B, C)[number % 3])
    assert len(relay.core.checkpoints) == 1


DAY = 86_400.0


def restored(relay: Driver, key: Key, digest: bytes, *, quorum_id: int = 1, committed: float = 0.0) -> None:
    """Add a durable checkpoint of an earlier process."""
    facts = Facts(int(key.id[1:]), Kind.DURABLE, 1, quorum_id)
    relay.core.restore(key, facts, {0: table(digest)}, committed, relay.now)


def test_durable_checkpoints_of_a_job_go_when_no_process_used_the_job_for_their_ttl() -> None:
    relay = Driver(durable_ttl_seconds=30 * DAY, live_ttl_seconds=DAY, reading_seconds=60)
    restored(relay, C1, A)
    restored(relay, C2, B)
    relay(ReadFrom(C1), at=20 * DAY)
    relay.stored(Key("job", "live"), C)
    assert relay(Tick(), at=50 * DAY) != [], "the live state goes"
    assert {*relay.core.checkpoints} == {C1, C2}
    assert relay.core.deadline() == 50 * DAY + 60, "both wait for the last use of the job"
    (forget, *_) = relay(Tick(), at=relay.core.deadline())
    assert forget == Forget(C2, "durable checkpoint of job job, which no process used for 30 days (--durable-ttl)")
    relay(Tick())
    assert not relay.core.checkpoints
    assert relay.core.deadline() == NEVER


def test_a_ttl_keeps_what_a_script_saved_by_itself_and_all_of_the_first_day_after_a_start() -> None:
    relay = Driver(durable_ttl_seconds=30 * DAY)
    restored(relay, C1, A, quorum_id=0, committed=-1000 * DAY)
    restored(relay, C2, B, committed=-1000 * DAY)
    assert relay(Tick(), at=DAY - 1) == []
    relay(Tick(), at=DAY)
    relay(Tick(), at=10_000 * DAY)
    assert {*relay.core.checkpoints} == {C1}
