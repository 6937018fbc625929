"""Events in any order that a relay can meet. After each, ``validate`` holds, and what an onlooker can check."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.core.events import (
    Aborted,
    Begun,
    ChunkArrived,
    ChunkHeld,
    ChunkLost,
    ChunkReleased,
    CommitAsked,
    Copied,
    Decision,
    DiskFull,
    Drop,
    Event,
    Evict,
    Facts,
    Forget,
    HolderReported,
    Key,
    Kind,
    Limits,
    MemoryWanted,
    RankReported,
    ReadFrom,
    RefusedError,
    Removed,
    RootReported,
    Seal,
    Sealed,
    SealFailed,
    Table,
    TableArrived,
    Tick,
    Tier,
    UploadEnded,
)
from keepstep_relay.core.invariants import check_invariants
from keepstep_relay.core.machine import RelayCore

KEYS = st.sampled_from([Key("job", "a"), Key("job", "a~1"), Key("job", "a~2"), Key("job", "b"), Key("other", "a")])
WHOLE = st.sampled_from([bytes([letter]) * 16 for letter in b"abc"])
SHORT = st.sampled_from([bytes([letter]) * 16 for letter in b"uv"])
DIGESTS = WHOLE | SHORT
TIERS = st.sampled_from(list(Tier))
UPLOADED = st.sampled_from([Tier.MEMORY, Tier.DISK])
RANKS = st.integers(0, 2)


class Onlooker(RuleBasedStateMachine):
    """Keeps its own books of the tiers, and of what was promised by a commit."""

    @initialize(keep=st.integers(0, 2), age=st.sampled_from([0.0, 50.0]))
    def begin(self, keep: int, age: float) -> None:
        limits = Limits(
            checkpoints=4,
            chunks=8,
            holders=2,
            upload_seconds=20,
            keep_live=keep,
            keep_durable=keep,
            durable_seconds=age,
        )
        self.core = RelayCore(limits)
        self.now = 0.0
        self.tiers: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.copies: dict[Key, set[bytes]] = {}
        """In the durable tier, by checkpoint."""
        self.taken: list[bytes] = []
        self.sealing: dict[Key, tuple[bytes, ...]] = {}
        self.committed: set[Key] = set()
        self.told: set[Key] = set()
        """Uploads whose end was reported."""

    def step(self, event: Event) -> list[Decision]:
        deadline = self.core.deadline()
        try:
            decisions = self.core.step(event, self.now)
        except RefusedError:
            return []
        asked = isinstance(event, (Removed, Aborted, RankReported, MemoryWanted, DiskFull, Begun))
        for decision in decisions:
            match decision:
                case Drop(digests):
                    for digest in digests:
                        assert digest not in self.taken, "dropped under a reader"
                        for tier in self.tiers.values():
                            tier.discard(digest)
                case Evict(digests):
                    for digest in digests:
                        assert digest not in self.taken, "evicted under a reader"
                        self.tiers[Tier.MEMORY].remove(digest)
                        assert any(digest in tier for tier in self.tiers.values()), "evicted from its last tier"
                        users = {key for key, _ in self.core.inventory.chunks[digest].users}
                        assert digest in self.tiers[Tier.DISK] or users <= set(self.copies), (
                            "only another's copy has it"
                        )
                case Seal(key, digests):
                    assert all(any(digest in tier for tier in self.tiers.values()) for digest in digests)
                    self.sealing[key] = digests
                case UploadEnded(key, _, committed, _, total, done):
                    assert committed == isinstance(event, Sealed)
                    assert 0 <= done <= total
                    self.told.add(key)
                case Forget(key):
                    assert key in self.told, "the end of the upload was not reported"
                    self.told.remove(key)
                    assert asked or deadline <= self.now or isinstance(event, Sealed), "nothing was due"
                    self.committed.discard(key)
                    self.tiers[Tier.DURABLE] -= self.copies.pop(key, set()) - set().union(*self.copies.values())
        return decisions

    @rule(
        key=KEYS, step=st.integers(0, 3), ranks=st.integers(1, 2), quorum_id=st.integers(0, 1), overwrite=st.booleans()
    )
    def begins(self, key: Key, step: int, ranks: int, quorum_id: int, overwrite: bool) -> None:
        version = self.core.to_begin(key, overwrite=overwrite)
        self.step(Begun(version, Facts(step, Kind.LIVE, ranks, quorum_id)))

    @rule(key=KEYS, rank=RANKS, whole=st.lists(WHOLE, max_size=3), last=DIGESTS, root=st.sampled_from([b"r", b"s"]))
    def table(self, key: Key, rank: int, whole: list[bytes], last: bytes, root: bytes) -> None:
        self.step(TableArrived(key, rank, Table(root * 32, len(whole) * CHUNK_BYTES + 10, (*whole, last))))

    @rule(key=KEYS, rank=RANKS, root=st.sampled_from([b"r", b"s"]))
    def root(self, key: Key, rank: int, root: bytes) -> None:
        self.step(RootReported(key, rank, "p", root * 32))

    @rule(digest=DIGESTS, tier=UPLOADED)
    def chunk(self, digest: bytes, tier: Tier) -> None:
        self.tiers[tier].add(digest)
        self.step(ChunkArrived(digest, tier))

    @rule(
        key=KEYS,
        step=st.integers(0, 3),
        whole=st.lists(WHOLE, max_size=3),
        last=SHORT,
        tier=UPLOADED,
        done=st.booleans(),
        overwrite=st.booleans(),
    )
    def upload(
        self, key: Key, step: int, whole: list[bytes], last: bytes, tier: Tier, done: bool, overwrite: bool
    ) -> None:
        key = self.core.to_begin(key, overwrite=overwrite)
        self.begins(key, step, 1, 1, overwrite)
        self.table(key, 0, whole, last, b"r")
        one = self.core.checkpoints.get(key)
        for digest in sorted(one.digests() if one else ()):
            self.chunk(digest, tier)
        self.commit(key)
        if done:
            self.sealed(key, works=True)

    @rule(digest=DIGESTS, tier=TIERS)
    def lost(self, digest: bytes, tier: Tier) -> None:
        if digest in self.tiers[tier] and digest not in self.taken:
            self.tiers[tier].discard(digest)
            self.step(ChunkLost(digest, tier))

    @rule(key=KEYS)
    def copied(self, key: Key) -> None:
        one = self.core.checkpoints.get(key)
        if one is not None and one.complete:
            self.copies[key] = {*one.digests()}
            self.tiers[Tier.DURABLE] |= self.copies[key]
            self.step(Copied(key))

    @rule(key=KEYS, rank=RANKS, error=st.sampled_from([None, None, "x"]), part=st.booleans())
    def report(self, key: Key, rank: int, error: str | None, part: bool) -> None:
        self.step(RankReported(key, rank, error, part))

    @rule(key=KEYS)
    def commit(self, key: Key) -> None:
        self.step(CommitAsked(key))

    @rule(key=KEYS, works=st.booleans())
    def sealed(self, key: Key, works: bool) -> None:
        if self.sealing.pop(key, None) is not None:
            works = works and self.core.checkpoints[key].complete
            if works:
                self.committed.add(key)
            self.step(Sealed(key) if works else SealFailed(key))

    @rule(key=KEYS)
    def abort(self, key: Key) -> None:
        self.step(Aborted(key, "asked"))

    @rule(key=KEYS)
    def remove(self, key: Key) -> None:
        self.step(Removed(key, "asked"))

    @rule(key=KEYS)
    def read(self, key: Key) -> None:
        self.step(ReadFrom(key))

    @rule(key=KEYS, rank=RANKS, bitmap=st.sampled_from([b"", b"\x01"]))
    def holder(self, key: Key, rank: int, bitmap: bytes) -> None:
        self.step(HolderReported(key, rank, "h", "http://h:1", bitmap))

    @rule(digest=DIGESTS)
    def take(self, digest: bytes) -> None:
        if self.core.inventory.is_here(digest):
            self.step(ChunkHeld(digest))
            self.taken.append(digest)

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.taken:
            digest = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
            self.step(ChunkReleased(digest))

    @rule(size=st.integers(1, 3 * CHUNK_BYTES))
    def room(self, size: int) -> None:
        self.step(MemoryWanted(size))

    @rule()
    def full_disk(self) -> None:
        self.step(DiskFull())

    @rule(seconds=st.sampled_from([0.0, 1.0, 15.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.step(Tick())
        assert self.core.deadline() > self.now, "a deadline that has passed and is still there"

    @invariant()
    def all_holds(self) -> None:
        check_invariants(self.core)
        for tier, digests in self.tiers.items():
            known = {digest for digest, chunk in self.core.inventory.chunks.items() if tier in chunk.tiers}
            assert known == digests, "the core's picture of a tier is wrong"
        there = {key for key, one in self.core.checkpoints.items() if one.committed_at is not None}
        assert there == self.committed


TestRelayCore = Onlooker.TestCase
TestRelayCore.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
