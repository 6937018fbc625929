"""Decisions of a relay about what leaves it: old checkpoints, and chunks when memory runs short."""

from __future__ import annotations

from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.core.checkpoint import NEVER
from keepstep_relay.core.events import (
    Begun,
    Cause,
    ChunkArrived,
    ChunkHeld,
    ChunkReleased,
    DiskFull,
    Drop,
    Evict,
    Facts,
    Forget,
    Key,
    Kind,
    MemoryWanted,
    ReadFrom,
    Removed,
    TableArrived,
    Tick,
    Wake,
)
from tests.unit.keepstep_relay.core.core_driver import C1, C2, C3, DISK, LAST, MEMORY, ONE, A, B, C, Driver, table


def test_the_newest_are_kept_and_uploads_do_not_count():
    relay = Driver(keep_live=1)
    relay.stored(C1, A, LAST, step=1)
    relay(Begun(C3, Facts(9, Kind.LIVE, 1)))
    decisions = relay.stored(C2, A, B, LAST, step=2)
    assert [one.key for one in decisions if isinstance(one, Forget)] == [C1]
    assert not [one for one in decisions if isinstance(one, Drop)], "the newer one has that chunk, too"


def test_retention_counts_each_job_and_kind_for_itself():
    relay = Driver(keep_live=1)
    relay.stored(C1, A)
    assert relay.stored(C2, B, step=2, kind=Kind.DURABLE)[1:] == [Wake((C2,))]
    assert relay.stored(Key("other", "c1"), C, step=3)[1:] == [Wake((Key("other", "c1"),))]


def test_a_checkpoint_that_is_read_stays_until_its_reader_is_done():
    relay = Driver(keep_live=1, reading_seconds=60)
    relay.stored(C1, A)
    relay(ReadFrom(C1), at=10)
    relay.stored(C2, B, step=2)
    assert C1 in relay.core.checkpoints
    assert relay.core.deadline() == 70
    relay(ChunkHeld(A), ChunkReleased(A), at=65)
    assert relay(Tick(), at=70) == []
    assert relay(Tick(), at=125)[:2] == [
        Forget(C1, "only the newest live checkpoints of a job are kept (1)"),
        Drop((A,)),
    ]


def test_room_is_made_by_live_states_beyond_the_count_that_nobody_reads_at_the_moment():
    relay = Driver(keep_live=1, reading_seconds=60)
    for number, digest in ((1, A), (2, B), (3, C)):
        relay.stored(Key("job", f"c{number}"), digest, step=number)
        relay(ChunkHeld(digest), ChunkReleased(digest))
    relay(ChunkHeld(A))
    reason = "only the newest live checkpoints of a job are kept (1); memory ran short"
    assert relay(MemoryWanted(1))[:2] == [Forget(Key("job", "c2"), reason), Drop((B,))]
    assert relay(MemoryWanted(1)) == [], "one is being read, the other is the newest"
    relay(ChunkReleased(A))
    assert relay(MemoryWanted(1))[:2] == [Forget(Key("job", "c1"), reason), Drop((A,))]
    assert relay(MemoryWanted(1)) == []


def test_a_full_disk_drops_the_longest_unused_live_state_of_a_manager():
    relay = Driver(reading_seconds=60)
    for at, (job, digest, facts) in enumerate(
        [
            ("script", A, Facts(1, Kind.LIVE, 1)),
            ("durable", B, Facts(1, Kind.DURABLE, 1, 1)),
            ("one", C, Facts(1, Kind.LIVE, 1, 1)),
            ("two", LAST, Facts(1, Kind.LIVE, 1, 1)),
        ]
    ):
        relay(at=float(at))
        relay.committed(Key(job, "c"), digest, facts=facts)
    assert relay(DiskFull(), at=60) == [], "all were used a minute ago"
    assert relay(DiskFull(), at=70)[0] == Forget(
        Key("one", "c"), "room for newer checkpoints (the disk is full): a live state unused for 68 s"
    )
    assert relay(DiskFull())[0].key == Key("two", "c")
    assert relay(DiskFull()) == []


def test_a_new_checkpoint_beyond_the_limit_takes_the_place_of_an_unused_live_state():
    relay = Driver(reading_seconds=60, checkpoints=2)
    relay.committed(C1, A, facts=Facts(1, Kind.LIVE, 1, 1))
    relay.committed(C2, B, facts=Facts(1, Kind.DURABLE, 1, 1))
    relay.refused(Begun(C3, ONE), Cause.FULL, "--max-checkpoints")
    assert relay(Begun(C3, ONE), at=61)[0] == Forget(
        C1, "room for newer checkpoints (--max-checkpoints): a live state unused for 61 s"
    )
    assert [*relay.core.checkpoints] == [C2, C3]


def test_age_drops_all_but_the_newest():
    relay = Driver(durable_seconds=100)
    relay.stored(C1, A, step=1, kind=Kind.DURABLE)
    relay.stored(C2, B, step=2, kind=Kind.DURABLE)
    assert relay.core.deadline() == 100
    assert [one.key for one in relay(Tick(), at=500) if isinstance(one, Forget)] == [C1]
    assert relay.core.deadline() == NEVER


def test_a_chunk_that_is_being_sent_is_dropped_when_it_is_let_go():
    relay = Driver()
    relay.stored(C1, A, B)
    relay(ChunkHeld(A))
    assert Drop((B,)) in relay(Removed(C1, "asked"))
    assert relay.core.inventory.wanted(A) is None
    assert relay(ChunkReleased(A)) == [Drop((A,))]


# ---- room


def test_room_comes_from_what_another_tier_has_the_longest_unused_first():
    relay = Driver()
    relay.stored(C1, A, B, C, LAST, tier=DISK)
    relay(*(ChunkArrived(digest, MEMORY) for digest in (A, B, C)), at=1000)
    relay(ChunkHeld(A), ChunkReleased(A))
    relay(at=2000)
    assert relay(MemoryWanted(CHUNK_BYTES + 1)) == [Evict((B, C))]
    assert relay(MemoryWanted(1)) == [Evict((A,))]
    assert relay(MemoryWanted(1)) == []


def test_chunks_that_only_memory_has_or_that_are_being_sent_stay():
    relay = Driver()
    relay.stored(C1, A, B, tier=MEMORY)
    relay(ChunkArrived(B, DISK), ChunkHeld(B))
    assert relay(MemoryWanted(1)) == []
    relay(ChunkReleased(B))
    assert relay(MemoryWanted(1)) == [Evict((B,))]


def test_chunks_of_an_open_upload_or_transfer_are_evicted_last():
    relay = Driver(reading_seconds=60)
    relay(Begun(C1, ONE), TableArrived(C1, 0, table(A)), ChunkArrived(A, MEMORY), ChunkArrived(A, DISK))
    relay.stored(C2, B, step=2)
    relay(ChunkArrived(B, DISK))
    assert relay(MemoryWanted(1)) == [Evict((B,))]
    assert relay(MemoryWanted(1)) == [Evict((A,))]


def test_a_durable_checkpoint_gets_the_memory_of_those_before_it_that_the_disk_has():
    relay = Driver()
    other = Key("other", "c1")
    live, durable = Facts(1, Kind.LIVE, 1), Facts(1, Kind.DURABLE, 1)
    relay.committed(other, LAST, facts=durable)
    relay.committed(C3, bytes(16), facts=live)
    relay.committed(C1, A, B, C, facts=durable)
    relay(*(ChunkArrived(digest, DISK) for digest in (A, C, LAST, bytes(16))), ChunkHeld(C))
    decisions = relay.committed(C2, b"d" * 16, C, facts=durable)
    assert Evict((A,)) in decisions, "only memory has B, a reader holds C, and the others are not of this job and kind"
    relay(ChunkArrived(b"d" * 16, DISK), ChunkReleased(C))
    assert Evict((C, b"d" * 16)) in relay.committed(Key("job", "c4"), b"e" * 16, facts=durable)
    assert not any(isinstance(one, Evict) for one in relay.committed(Key("job", "c5"), b"f" * 16, facts=live))


def test_a_durable_checkpoint_keeps_its_own_chunks_in_memory():
    relay = Driver()
    durable = Facts(1, Kind.DURABLE, 1)
    relay.committed(C1, A, B, facts=durable)
    relay(ChunkArrived(A, DISK), ChunkArrived(B, DISK))
    assert Evict((A,)) in relay.committed(C2, B, facts=durable)
