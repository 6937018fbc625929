"""Decisions of a relay: uploads, commits, limits, expiry. Each test is a table of events and decisions."""

from __future__ import annotations

import pytest

from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.core.checkpoint import NEVER
from keepstep_relay.core.events import (
    Aborted,
    Begun,
    Cause,
    ChunkArrived,
    ChunkHeld,
    ChunkLost,
    ChunkReleased,
    CommitAsked,
    Copied,
    Drop,
    Facts,
    Forget,
    HolderReported,
    Keep,
    Kind,
    LayoutReported,
    MemoryWanted,
    RankReported,
    RankWaits,
    Removed,
    RootReported,
    Seal,
    Sealed,
    SealFailed,
    State,
    TableArrived,
    Tick,
    Tier,
    TooLate,
    UploadEnded,
    Wake,
)
from tests.unit.keepstep_relay.core.core_driver import C1, C2, DISK, LAST, MEMORY, ONE, A, B, C, Driver, table


def test_an_upload_from_its_beginning_to_its_commit():
    relay = Driver()
    assert relay(Begun(C1, ONE)) == [Keep(C1), Wake((C1,))]
    assert relay.core.checkpoints[C1].state is State.BEGUN
    (woken,) = relay(TableArrived(C1, 0, table(A, B, LAST)))
    assert set(woken.what) == {C1, A, B, LAST}
    assert relay.core.checkpoints[C1].state is State.PLANNED
    relay.refused(CommitAsked(C1), Cause.CONFLICT, "3 missing chunks")
    assert relay(ChunkArrived(B, MEMORY)) == [Wake((B,))]
    assert relay.core.checkpoints[C1].state is State.UPLOADING
    assert relay.core.inventory.missing(table(A, B, LAST)) == (bytes([0b101]), 2)
    relay(ChunkArrived(A, MEMORY), ChunkArrived(LAST, DISK), at=2.0)
    assert relay(CommitAsked(C1)) == [Seal(C1, (A, B, LAST))]
    assert relay(CommitAsked(C1)) == [], "another request does it already"
    assert relay(Sealed(C1), at=4.0) == [
        UploadEnded(C1, ONE, True, "", 2 * CHUNK_BYTES + 100, 2 * CHUNK_BYTES + 100, CHUNK_BYTES + 50, 2.0),
        Wake((C1,)),
    ]
    assert relay.core.checkpoints[C1].state is State.COMMITTED
    assert relay.core.inventory.tier_bytes == {MEMORY: 2 * CHUNK_BYTES, DISK: 100, Tier.DURABLE: 0}


def test_missing_chunks_are_counted_in_bytes_and_arriving_ones_in_bytes_a_second():
    relay = Driver()
    relay(Begun(C1, Facts(1, Kind.LIVE, 2)), TableArrived(C1, 0, table(A, A, LAST)), at=10.0)
    one = relay.core.checkpoints[C1]
    assert relay.core.missing_bytes(one) == CHUNK_BYTES + 100
    assert one.throughput.rate(12.0) == 0
    relay(TableArrived(C1, 1, table(A, B)), ChunkArrived(A, MEMORY), at=12.0)
    assert relay.core.missing_bytes(one) == 200, "B has another length as the last of its pack"
    assert one.throughput.rate(12.0) == 2 * CHUNK_BYTES / 2
    relay(ChunkArrived(A, DISK), at=14.0)
    assert one.came_bytes == 2 * CHUNK_BYTES, "it was here"
    assert one.throughput.rate(20.0) == 0


def test_beginning_twice_is_beginning_once_and_another_state_under_the_name_is_refused():
    relay = Driver()
    relay(Begun(C1, ONE))
    assert relay(Begun(C1, ONE)) == []
    relay.refused(Begun(C1, Facts(2, Kind.LIVE, 1)), Cause.CONFLICT, "with step 1, .* not with step 2, .*: use")


def test_a_chunk_that_is_here_already_is_not_missing():
    relay = Driver()
    relay.stored(C1, A, B)
    assert relay(Begun(C2, ONE), TableArrived(C2, 0, table(A, C, B)))[-1] == Wake((C2, C))
    assert relay.core.inventory.missing(relay.core.checkpoints[C2].tables[0]) == (bytes([0b010]), 1)
    relay(Removed(C1, "asked"))
    assert relay.core.inventory.is_here(A), "the other checkpoint needs it"


def test_a_chunk_that_comes_twice_in_a_pack_is_one():
    relay = Driver()
    relay(Begun(C1, ONE), TableArrived(C1, 0, table(A, A, LAST)))
    assert relay.core.inventory.missing(table(A, A, LAST)) == (bytes([0b111]), 3)
    relay(ChunkArrived(A, MEMORY), ChunkArrived(LAST, MEMORY))
    assert relay(CommitAsked(C1)) == [Seal(C1, (A, LAST))]


def test_a_chunk_that_no_table_names_is_dropped():
    relay = Driver()
    assert relay(ChunkArrived(A, DISK)) == [Drop((A,))]
    assert relay.core.inventory.wanted(A) is None


def test_one_digest_has_one_length():
    relay = Driver()
    relay(Begun(C1, ONE), TableArrived(C1, 0, table(A, B)), Begun(C2, ONE))
    relay.refused(TableArrived(C2, 0, table(A, last=7)), Cause.CONFLICT, "has 7 bytes")
    relay.refused(TableArrived(C2, 0, table(C, C)), Cause.CONFLICT, "has 100 bytes")
    assert not relay.core.checkpoints[C2].tables


def test_the_first_root_counts_and_another_is_remembered():
    relay = Driver()
    relay(Begun(C1, ONE), RootReported(C1, 0, "r0", b"r" * 32), RootReported(C1, 0, "r1", b"x" * 32))
    relay.refused(TableArrived(C1, 0, table(A, root=b"x" * 32)), Cause.CONFLICT, "another state")
    relay(TableArrived(C1, 0, table(A)), RootReported(C1, 0, "r2", b"r" * 32))
    assert set(relay.core.checkpoints[C1].roots[0]) == {"r0", "r1", "r2"}
    assert relay.core.checkpoints[C1].root(0) == b"r" * 32


def test_ranks_learn_when_all_layouts_are_here_and_a_rank_that_waits_is_alive():
    relay = Driver(upload_seconds=10)
    relay(Begun(C1, Facts(1, Kind.DURABLE, 2)), at=0)
    assert relay(LayoutReported(C1, 1, A), at=6) == []
    relay.refused(LayoutReported(C1, 1, B), Cause.CONFLICT, "rank 1 of .* has another layout already")
    relay.refused(LayoutReported(C1, 2, A), Cause.CONFLICT, "no rank 2: expected 0 to 1")
    assert relay(LayoutReported(C1, 0, A), at=7) == [Wake((C1,))]
    relay(RankWaits(C1, 0), at=15)
    told, *_rest = relay(Tick(), at=16)
    assert told.error == "no sign of life of rank 1 for 10 s (--upload-timeout)"
    relay.refused(RankWaits(C1, 0), Cause.GONE, "no sign of life of rank 1")


def test_ranks_commit_together():
    relay = Driver()
    relay(Begun(C1, Facts(1, Kind.DURABLE, 2)), TableArrived(C1, 0, table(A)), ChunkArrived(A, DISK))
    assert relay(RankReported(C1, 0)) == []
    relay.refused(CommitAsked(C1), Cause.CONFLICT, "first of rank 1")
    relay.refused(RankReported(C1, 1), Cause.CONFLICT, "missing manifest: rank 1")
    relay.refused(RankReported(C1, 2), Cause.CONFLICT, "no rank 2: expected 0 to 1")
    relay(TableArrived(C1, 1, table(B)))
    relay.refused(RankReported(C1, 1), Cause.CONFLICT, "1 missing chunks: rank 1")
    relay(ChunkArrived(B, DISK))
    assert relay(RankReported(C1, 1)) == [Seal(C1, (A, B))], "the last report commits"


def test_an_open_checkpoint_is_never_committed_and_lives_as_long_as_its_rank_gives_signs_of_life():
    relay = Driver(upload_seconds=10)
    relay(Begun(C1, Facts(1, Kind.LIVE, 1, stays_open=True)), TableArrived(C1, 0, table(A)), at=0)
    relay.refused(RankReported(C1, 0), Cause.CONFLICT, "1 missing chunks")
    relay(ChunkArrived(A, MEMORY), at=1)
    assert relay(RankReported(C1, 0), at=2) == []
    relay.refused(CommitAsked(C1), Cause.CONFLICT, "is open, and never committed")
    relay.refused(Begun(C1, ONE), Cause.CONFLICT, "with step 1, .*, open, not with step 1")
    relay(RankWaits(C1, 0), at=11)
    assert relay(Tick(), at=20.5) == []
    told, *_rest = relay(Tick(), at=21)
    assert (told.committed, told.bytes_done) == (False, 100)
    assert not relay.core.inventory.is_here(A)


def test_a_rank_of_an_open_checkpoint_that_has_reported_keeps_it_alive_too():
    relay = Driver(upload_seconds=10)
    relay(Begun(C1, Facts(1, Kind.LIVE, 2, stays_open=True)), TableArrived(C1, 0, table(A)), at=0)
    relay(ChunkArrived(A, MEMORY), RankReported(C1, 0), at=2)
    relay(RankWaits(C1, 1), at=11)
    told, *_rest = relay(Tick(), at=12)
    assert not told.committed
    relay.refused(RankWaits(C1, 1), Cause.GONE, "no sign of life of rank 0 for 10 s")


def test_a_part_is_not_waited_for_nor_committed_and_goes_when_nobody_has_read_from_it_for_a_while():
    relay = Driver(upload_seconds=10, reading_seconds=20)
    relay(Begun(C1, Facts(1, Kind.LIVE, 2)), TableArrived(C1, 0, table(A, B)), TableArrived(C1, 1, table(C)))
    relay(ChunkArrived(A, MEMORY), RankReported(C1, 0, part=True), at=5)
    assert relay.core.deadline() == 10, "rank 1 is waited for"
    (told,) = relay(RankReported(C1, 1, part=True), at=6)
    assert (told.committed, told.error, told.bytes_done) == (False, "", CHUNK_BYTES)
    assert relay(RankReported(C1, 1, part=True), at=6) == [], "one decision, once"
    assert relay.core.checkpoints[C1].state is State.PART
    relay.refused(CommitAsked(C1), Cause.CONFLICT, "2 missing chunks")
    relay(ChunkHeld(A), ChunkReleased(A), at=25)
    assert relay(Tick(), at=44.9) == []
    assert relay(Tick(), at=45) == [
        Forget(C1, "partial live state without a reader for 20 s"),
        Drop((A, B, C)),
        Wake((C1, A, B, C)),
    ]
    assert relay.core.deadline() == NEVER


def test_a_part_that_is_all_of_it_is_committed():
    relay = Driver()
    relay(Begun(C1, ONE), TableArrived(C1, 0, table(A)), ChunkArrived(A, MEMORY))
    assert relay(RankReported(C1, 0, part=True)) == [Seal(C1, (A,))]


def test_a_part_that_lost_a_chunk_is_an_upload_again():
    relay = Driver(upload_seconds=10)
    relay(Begun(C1, ONE), TableArrived(C1, 0, table(A, B)), ChunkArrived(A, MEMORY), RankReported(C1, 0, part=True))
    relay(ChunkLost(A, MEMORY), at=3)
    assert relay.core.checkpoints[C1].state is State.UPLOADING
    assert relay.core.deadline() == 13


def test_a_durable_checkpoint_is_never_a_part():
    relay = Driver()
    relay(Begun(C1, Facts(1, Kind.DURABLE, 1)), TableArrived(C1, 0, table(A)))
    relay.refused(RankReported(C1, 0, part=True), Cause.CONFLICT, "all of its chunks must be at one relay")
    assert set(relay.core.checkpoints) == {C1}, "the upload goes on"


def test_a_rank_that_failed_ends_the_upload():
    relay = Driver()
    relay(Begun(C1, Facts(1, Kind.LIVE, 2)), TableArrived(C1, 0, table(A)), ChunkArrived(A, MEMORY))
    decisions = relay(RankReported(C1, 1, "out of memory"))
    told, *rest = decisions
    assert (told.error, told.committed) == ("rank 1 failed: out of memory", False)
    assert told.bytes_done == told.bytes_total == 100
    assert rest == [Forget(C1, "rank 1 failed: out of memory"), Drop((A,)), Wake((C1, A))]
    relay.refused(CommitAsked(C1), Cause.GONE, "out of memory")
    assert relay(Begun(C1, ONE))[0] == Keep(C1), "it may be tried again"


def test_a_rank_that_vanished_ends_the_upload_and_a_chunk_is_a_sign_of_life():
    relay = Driver(upload_seconds=10)
    relay(Begun(C1, Facts(1, Kind.LIVE, 2)), at=0)
    assert relay.core.deadline() == 10
    relay(TableArrived(C1, 0, table(A, B)), TableArrived(C1, 1, table(C)), at=8)
    assert relay(Tick(), at=17.9) == []
    relay(ChunkArrived(A, MEMORY), at=17.9)
    told, forget, *_rest = relay(Tick(), at=18)
    assert (told.error, told.came_at) == ("", 17.9), "a live state was of use for its time"
    assert (told.bytes_done, told.bytes_total) == (CHUNK_BYTES, CHUNK_BYTES + 200)
    assert forget == Forget(C1, "no sign of life of rank 1 for 10 s (--upload-timeout)")
    assert relay.core.deadline() == NEVER


def test_a_rank_that_has_reported_is_not_waited_for():
    relay = Driver(upload_seconds=10)
    relay(
        Begun(C1, Facts(1, Kind.LIVE, 2)), TableArrived(C1, 0, table(A)), ChunkArrived(A, MEMORY), RankReported(C1, 0)
    )
    relay(RootReported(C1, 1, "r0", b"r" * 32), at=9)
    assert relay(Tick(), at=18.9) == []
    assert relay(Tick(), at=19)[1] == Forget(C1, "no sign of life of rank 1 for 10 s (--upload-timeout)")


def test_a_durable_upload_of_which_nobody_says_more_has_failed():
    relay = Driver(upload_seconds=10)
    relay(Begun(C1, Facts(1, Kind.DURABLE, 1)), at=0)
    assert relay(Tick(), at=10)[0].error == "no sign of life of rank 0 for 10 s (--upload-timeout)"


def test_a_commit_that_failed_may_be_asked_for_again_and_is_waited_for():
    relay = Driver(upload_seconds=10)
    relay(Begun(C1, ONE), TableArrived(C1, 0, table(A)), ChunkArrived(A, MEMORY), RankReported(C1, 0))
    relay.refused(Aborted(C1, "x"), Cause.CONFLICT, "being committed")
    relay.refused(Removed(C1, "x"), Cause.CONFLICT, "being committed")
    assert relay(SealFailed(C1), at=5) == [Wake((C1,))]
    assert relay.core.deadline() == 15
    assert relay(CommitAsked(C1)) == [Seal(C1, (A,))]


def test_a_damaged_chunk_is_missing_again_and_may_be_uploaded_again():
    relay = Driver()
    relay.stored(C1, A, B, tier=DISK)
    assert relay(ChunkLost(A, DISK)) == []
    assert relay.core.checkpoints[C1].missing == {0: 1}
    assert relay.core.inventory.wanted(A) == CHUNK_BYTES
    assert not relay.core.is_coming(A), "no upload brings it"
    relay(ChunkArrived(A, MEMORY))
    assert relay.core.checkpoints[C1].complete


def test_a_copy_of_another_checkpoint_is_no_place_to_leave_a_chunk_to():
    relay = Driver(reading_seconds=0)
    relay.stored(C1, A, kind=Kind.DURABLE)
    relay.stored(C2, A, step=2)
    relay(Copied(C1))
    assert relay(MemoryWanted(1), at=1) == [], "the copy goes with its checkpoint"
    relay(Removed(C1, "x"))
    assert relay.core.inventory.chunks[A].tiers == {MEMORY}
    assert relay(MemoryWanted(1), at=2) == []


def test_a_committed_checkpoint_does_not_change():
    relay = Driver()
    relay.stored(C1, A)
    relay.refused(Aborted(C1, "x"), Cause.CONFLICT, "is already committed")
    relay.refused(RankReported(C1, 0, "late"), Cause.CONFLICT, "is already committed")
    assert relay(CommitAsked(C1), RankReported(C1, 0), TableArrived(C1, 0, table(A))) == []


# ---- limits


@pytest.mark.parametrize(
    ("limits", "event", "words"),
    [
        ({"checkpoints": 1}, Begun(C2, ONE), "full: 1 checkpoints"),
        ({"chunks": 2}, TableArrived(C1, 0, table(A, B, C)), "3 more chunks"),
        ({"ranks": 2}, Begun(C2, Facts(1, Kind.LIVE, 3)), "3 ranks"),
    ],
)
def test_beyond_a_limit_nothing_is_taken(limits, event, words):
    relay = Driver(**limits)
    relay(Begun(C1, ONE))
    relay.refused(event, Cause.FULL, words)
    assert set(relay.core.checkpoints) == {C1}


def test_holders_are_bounded_fit_and_are_forgotten():
    relay = Driver(holders=1, holder_seconds=30)
    relay(Begun(C1, ONE))
    relay.refused(HolderReported(C1, 0, "j1", "http://a:1", b"\x01"), Cause.CONFLICT, "no manifest")
    relay(TableArrived(C1, 0, table(A, B)), HolderReported(C1, 0, "j1", "http://a:1", b"\x01"))
    relay.refused(HolderReported(C1, 0, "j1", "http://a:1", b"\x01\x00"), Cause.CONFLICT, "invalid bitmap of 2 bytes")
    relay.refused(HolderReported(C1, 0, "j2", "http://b:1", b"\x01"), Cause.FULL, "too many holders .limit 1")
    relay(Tick(), at=30)
    assert not relay.core.checkpoints[C1].holders


def test_the_unknown_is_unknown_and_the_past_is_gone_with_its_reason():
    relay = Driver()
    relay.refused(CommitAsked(C1), Cause.UNKNOWN, "checkpoint c1 of job job not found")
    relay.stored(C1, A)
    relay(Removed(C1, "asked for"))
    relay.refused(CommitAsked(C1), Cause.GONE, "was deleted: asked for")
    assert not relay.core.checkpoints


def test_a_checkpoint_that_was_written_down_is_taken_up_with_what_is_there_of_it():
    relay = Driver(upload_seconds=10)
    relay.core.restore(C1, ONE, {0: table(A, B)}, None, now=100)
    relay(ChunkArrived(A, DISK), at=100)
    assert relay.core.checkpoints[C1].missing == {0: 1}
    assert relay.core.deadline() == 110
    assert relay(ChunkArrived(C, DISK)) == [Drop((C,))]


def test_a_rank_that_begins_soon_after_another_failed_gets_the_reason_once():
    relay, facts = Driver(), Facts(3, Kind.DURABLE, 3)
    relay(Begun(C1, facts, 0), Begun(C1, facts, 1), RankReported(C1, 1, "no memory"))
    assert relay(Begun(C1, facts, 2)) == [TooLate("rank 1 failed: no memory")]
    assert relay(Begun(C1, facts, 2)) == [Keep(C1), Wake((C1,))], "a retry"
    relay(Aborted(C1, "by hand"))
    assert relay(Begun(C1, facts, 0)) == [Keep(C1), Wake((C1,))], "no rank has failed"

    relay(RankReported(C1, 0, "no memory"))
    assert relay(Begun(C1, facts, 0)) == [Keep(C1), Wake((C1,))], "a retry of the one that failed"
    assert relay(Begun(C1, facts, 1)) == [], "it joins the retry"
    relay(RankReported(C1, 0, "no memory"))
    assert relay(Begun(C1, facts)) == [Keep(C1), Wake((C1,))], "a client that does not name its rank"

    relay(RankReported(C1, 0, "no memory"))
    assert relay(Begun(C1, facts, 1), at=relay.now + 60.0) == [Keep(C1), Wake((C1,))], "too long ago"
    relay.refused(Begun(C1, facts, 3), Cause.CONFLICT, "has no rank 3: expected 0 to 2")


def test_a_deleted_checkpoint_begins_again_unless_the_request_forbids_it():
    relay = Driver()
    assert relay(Begun(C1, ONE, again=False)) == [Keep(C1), Wake((C1,))], "it is new"
    assert relay(Begun(C1, ONE, again=False)) == [], "it joins"
    relay(Aborted(C1, "no memory"))
    for _ in range(2):
        assert relay(Begun(C1, ONE, 0, again=False)) == [TooLate("no memory")]
    assert relay(Begun(C1, ONE, 0)) == [Keep(C1), Wake((C1,))]
