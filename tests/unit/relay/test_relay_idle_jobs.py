"""Live states of jobs that are gone: they leave the relay, durable checkpoints never do."""

from __future__ import annotations

from keepstep_relay.core.checkpoint import NEVER
from keepstep_relay.core.events import ChunkHeld, ChunkReleased, Forget, Key, Kind, ReadFrom, Tick
from tests.unit.relay.core_driver import C1, A, B, C, Driver


def test_the_last_live_state_of_a_job_goes_when_nobody_used_it_for_its_ttl() -> None:
    relay = Driver(live_ttl_seconds=1000, reading_seconds=60)
    relay.stored(C1, A)
    assert relay.core.deadline() == 1000
    relay(ReadFrom(C1), at=900)
    assert relay(Tick(), at=1900) == []
    assert relay.core.deadline() == 1960
    (forget, *_) = relay(Tick(), at=1960)
    assert forget == Forget(C1, "last live state of job job, unused for 1000 s (--live-ttl)")
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
