"""Agree with all ranks that their models, optimizers and loaders fit together, and refuse by name those that differ."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import msgpack

from keepstep.one_copy.copies.frames import CopyError
from keepstep.one_copy.core.holding import Holding
from keepstep.one_copy.core.recovery_plan import Kind, Recovery, Way
from keepstep.one_copy.core.world import World
from keepstep.one_copy.member_link import MemberLink
from keepstep.one_copy.recovery.compared_builds import MAX_NAMED, ComparedBuild, Told, Verdict, compare, facts_of
from keepstep.one_copy.recovery.meeting import Meeting
from keepstep.one_copy.shard.own_shard import Held, OwnShard
from keepstep.runtime.exits import MismatchExit, StateMismatchExit
from keepstep_mesh.errors import ExitWithReason, KeepstepError
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.text import listed

NO_LOADER = 1 << 62
"""Vote of a rank that has no loader."""


class UnfitMembersError(KeepstepError):
    """The members of a quorum do not fill the mesh, or ``build`` gives another model for their number."""


@dataclass(kw_only=True)
class BuildAgreement:
    """Compares what this rank has with what the others have. On the training thread."""

    member: MemberLink
    shard: OwnShard
    build_timeout: timedelta
    meeting: Meeting | None = None
    """Where the ranks of the current quorum tell each other what they have."""
    loaders: list[str] = field(default_factory=list)
    """Values that all ranks must share, of the loaders from which this rank has taken a batch in this attempt."""

    def __post_init__(self) -> None:
        self._compared = ComparedBuild()
        self._alike = False
        """Whether all ranks had the same facts in the last recovery, so that their options of each step are equal."""

    def of_recovery(
        self, recovery: Recovery, holdings: Sequence[Holding], held: Held | None, problem: str = ""
    ) -> None:
        """Refuse the members whose model or optimizer differs from that of the others.

        Args:
            recovery: its plan.
            holdings: of all ranks.
            held: shard of this rank; None: its model does not fit.
            problem: why the model of this rank does not fit the job, or its checkpoint.

        Raises:
            MismatchExit, StateMismatchExit: this member differs.
            UnfitMembersError: members that have shards build another model for this number of ranks than before.
            CopyError: other members differ, and end.
        """
        facts = self._facts(held) if held is not None else b""
        world = recovery.world
        mine = self._told(held, facts, problem)
        told = [Told.of(one) for one in self._gather(world, "told ", mine, build=self.build_timeout)]
        self._alike = len({(one.digest, one.of_step) for one in told}) == 1
        holders = {holdings[one.holder].replica_id for one in recovery.sources if one.way is not Way.COPY}
        seats = [seat for seat, one in enumerate(world.seats) if one.replica_id in holders]
        having = [rank for rank in range(world.size) if rank // world.ranks_per_seat in seats]
        if odd := frozenset(rank for rank, one in enumerate(told) if one.problem):
            if not odd.isdisjoint(having):  # without these members shards would be lost
                raise UnfitMembersError(told[min(odd.intersection(having))].problem)
            kind = StateMismatchExit if recovery.kind is Kind.RESUMED else MismatchExit
            self._refuse(world, Verdict(odd, problem or told[min(odd)].problem), "builds", kind)
        if len({one.digest for one in told}) > 1:
            self._compare(world, "", facts, [one.digest for one in told], having)

    def compare_step(self, step: int) -> None:
        """Find the ranks that would step with other options than the others, after a vote has shown that some do.

        Raises:
            MismatchExit: this member differs.
        """
        held = self.shard.now()
        facts, key = self._facts(held), f"{step} "
        told = [Told.of(one) for one in self._gather(held.world, f"told {key}", self._told(held, facts))]
        self._compare(held.world, key, facts, [one.digest for one in told], ())
        self._alike = False  # only options of plain tensors differ, which may

    def compare_loaders(self, step: int) -> None:
        """Find the ranks whose loaders differ from those of the others, after a vote has shown that some do.

        Raises:
            MismatchExit: this member differs.
        """
        world = self.shard.now().world
        told = dict(enumerate(self._gather(world, f"loaders {step} ", "; ".join(self.loaders).encode())))
        with_loaders = [rank for rank, data in told.items() if data]
        names = [name_of(world.seats[rank // world.ranks_per_seat].replica_id) for rank in with_loaders]
        facts = [{"all": {"data loader": told[rank].decode()}, "meshes": [], "parameters": {}} for rank in with_loaders]
        verdict = compare(facts, (), names)
        if verdict.odd:
            odd = frozenset(with_loaders[one] for one in verdict.odd)
            self._refuse(world, Verdict(odd, verdict.difference), f"loaders {step}")

    def loader_votes(self) -> list[int]:
        """Return two numbers whose minima over all ranks are opposite if their loaders are alike.

        Ranks without a loader, such as those of a later stage of a pipeline, agree with all others.
        """
        if not self.loaders:
            return [NO_LOADER, NO_LOADER]
        digest = hashlib.blake2b("; ".join(self.loaders).encode(), digest_size=7).digest()
        number = int.from_bytes(digest)
        return [number, -number]

    def step_digest(self) -> int:
        """Return what all ranks must have in common in the vote on a step; 0: their options differ for good."""
        return self._compared.step_digest(self.shard.now()) if self._alike else 0

    def _facts(self, held: Held) -> bytes:
        return self._compared.packed(held, self.shard.others(held.built))

    def _told(self, held: Held | None, facts: bytes, problem: str = "") -> bytes:
        of_step = self._compared.step_digest(held) if held is not None else 0
        data: bytes = msgpack.packb([hashlib.blake2b(facts, digest_size=16).hexdigest(), of_step, problem])
        return data

    def _compare(self, world: World, key: str, facts: bytes, digests: list[str], having: Sequence[int]) -> None:
        """Compare the facts of all ranks. One rank of each digest tells them."""
        first = [digests.index(one) for one in dict.fromkeys(digests)]
        told = self._gather(world, f"facts {key}", facts, first)
        known = {digests[rank]: facts_of(data) for rank, data in zip(first, told, strict=True)}
        names = [name_of(world.seats[rank // world.ranks_per_seat].replica_id) for rank in range(world.size)]
        verdict = compare([known[one] for one in digests], having, names)
        if verdict.odd:
            self._refuse(world, verdict, f"facts {key}")

    def _refuse(
        self, world: World, verdict: Verdict, key: str, kind: type[MismatchExit | StateMismatchExit] = MismatchExit
    ) -> None:
        """End this member if one of its ranks is odd, else expect that others end. Of ``key`` all have the verdict."""
        seats = sorted({rank // world.ranks_per_seat for rank in verdict.odd})
        error: ExitWithReason | None = None
        if world.seat_of(self.member.replica_id) in seats:
            what_to_do = "; run the same script with the same settings in all members"
            error = self.member.ends_with(kind(verdict.difference + (what_to_do if kind is MismatchExit else "")))
        self.all_know(world, key)
        if error is not None:
            raise error
        names = listed([name_of(world.seats[one].replica_id) for one in seats], MAX_NAMED)
        raise CopyError(f"{names} must end, because its model or optimizer differs: {verdict.difference}")

    def all_know(self, world: World, what: str) -> None:
        """Wait until all ranks know why some of them end. Else the first end would be the loss of a member for others,
        which would wait for more members, or train on without those that differ from them.
        """
        with contextlib.suppress(KeepstepError, TimeoutError, OSError):  # a rank that knows it has ended
            self._gather(world, f"known {what} ", b"")

    def _gather(
        self, world: World, name: str, mine: bytes, ranks: Sequence[int] | None = None, build: timedelta = timedelta()
    ) -> list[bytes]:
        meeting, own = self.meeting, (self.member.replica_id, self.member.settings.rank)
        assert meeting is not None
        at = [divmod(rank, world.ranks_per_seat) for rank in (range(world.size) if ranks is None else ranks)]
        members = [(world.seats[seat].replica_id, rank) for seat, rank in at]
        return meeting.gather(name, mine, own, members, build)
