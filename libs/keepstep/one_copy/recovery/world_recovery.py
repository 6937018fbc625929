"""Bring all ranks of a quorum to one state, in one world, with connected process groups and keepers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch import nn

from keepstep.checkpoint.managed.rank_agreement import RANK_ROUNDS
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.one_copy.copies.copy_sender import CopySender, Membership
from keepstep.one_copy.copies.copy_server import CopyServer, Served
from keepstep.one_copy.copies.keeper import Keeper
from keepstep.one_copy.copies.rank_state import OtherModelError, RankState
from keepstep.one_copy.copies.shard_reader import ShardReader
from keepstep.one_copy.core.holding import Holding, Shard, State
from keepstep.one_copy.core.mesh_shape import MeshShape
from keepstep.one_copy.core.recovery_plan import Kind, Recovery, Source, Way, plan_recovery
from keepstep.one_copy.core.world import World, keepers
from keepstep.one_copy.durable.shard_checkpoints import ShardCheckpoints, StoredShards
from keepstep.one_copy.member_link import MemberLink
from keepstep.one_copy.recovery.build_agreement import BuildAgreement, UnfitMembersError
from keepstep.one_copy.recovery.meeting import CHECKPOINT, GROUPS, Meeting
from keepstep.one_copy.recovery.sources import Sources, serving
from keepstep.one_copy.shard.built import Built
from keepstep.one_copy.shard.own_shard import Held, OwnShard, random_state, restore_random_state
from keepstep.one_copy.world.world_groups import WorldGroups
from keepstep.runtime.devices import queued_work
from keepstep.runtime.exits import PrintedExit
from keepstep.state.errors import StateMismatch
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.exit_codes import EXIT_STATE_LOST
from keepstep_mesh.protocol.lineage import NEW
from keepstep_mesh.threads.starting import ThreadPoolExecutor

log = get_logger("keepstep.one_copy")


class StateLost(PrintedExit):
    """Members were lost together with their keepers, and no checkpoint has their shards.

    ``step``: the number of committed steps that are lost.
    """

    exit_code = EXIT_STATE_LOST
    happened = "shards of this job are lost"

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.step = step


@dataclass(kw_only=True)
class WorldRecovery:
    """Recovers this rank, together with all others of a quorum."""

    build: Callable[[Any], Any]
    init: Callable[[nn.Module], object] | None
    shape: MeshShape
    copies: int
    """Number of keepers of each rank."""
    domain: str
    """Failure domain of this member."""
    timeout: timedelta
    build_timeout: timedelta
    member: MemberLink
    groups: WorldGroups
    server: CopyServer
    keeper: Keeper
    sender: CopySender
    shard: OwnShard
    checkpoints: ShardCheckpoints
    agreement: BuildAgreement
    ended: Callable[[], str]
    """Returns why the quorum has ended; empty: it has not."""

    def __post_init__(self) -> None:
        self._meeting: Meeting | None = None

    # ---- all of it

    def run(self, plan: QuorumPlan) -> Recovery:
        """Recover in a quorum. Then the shard, the groups and the keepers are those of its world.

        Raises:
            UnfitMembersError, StateLost: see there.
            MismatchExit, StateMismatchExit: this member differs from the others, or from the checkpoint.
            Exception: a member was lost; try again in another quorum.
        """
        began = time.monotonic()
        self.sender.disconnect()
        meeting = self._meet(plan)
        settings = self.member.settings
        holdings = meeting.exchange(self._holding(), settings.world_size)
        recovery = plan_recovery(plan.quorum_id, holdings, copies=self.copies, fits=self.shape.fits)
        world = recovery.world
        if recovery.kind is Kind.UNFIT:
            raise UnfitMembersError(
                f"{world.size} ranks do not fill the mesh {self.shape.sizes}; waiting for another member"
            )
        seat = world.seat_of(self.member.replica_id)
        assert seat is not None
        rank = world.rank(seat, settings.rank)
        found = None
        if recovery.kind in (Kind.FRESH, Kind.LOST):
            found = self.checkpoints.newest(meeting.store(CHECKPOINT), rank, world.size, self.ended)
        if recovery.kind is Kind.LOST and found is None:
            lost = self.member.ends_with(StateLost(_lost_text(recovery, self.copies), recovery.given_up))
            self.agreement.all_know(world, "lost")
            raise lost
        self.groups.configure(
            rank,
            world.size,
            plan.quorum_id,
            lambda number: meeting.store(GROUPS + number),
            host=settings.host,
            name=self.member.replica_id,
        )
        problem = ""
        if found is not None:
            held, problem = self._resumed(found, world, rank)
            given_up = max(0, recovery.given_up - held.state.step)
            recovery = replace(recovery, kind=Kind.RESUMED, target=held.state, given_up=given_up)
        elif recovery.kind is Kind.FRESH:
            held = self._begun(world, rank)
        else:
            held = self._brought_to_target(recovery, holdings, rank)
        if recovery.kind in (Kind.FRESH, Kind.RESUMED):
            self.agreement.of_recovery(recovery, holdings, None if problem else held, problem)
        if held is not self.shard.held:
            self.shard.rebuilt = held
        self._connect_copies(recovery, holdings, held)
        self.groups.vote([1], self.timeout)  # all ranks have their shard, and copies of it where it was cut again
        self.shard.take(held)
        self.server.end_copies_before(world.formed)
        self._tell(recovery, rank, time.monotonic() - began)
        return recovery

    def _tell(self, recovery: Recovery, rank: int, seconds: float) -> None:
        log.info(
            "world formed",
            kind=recovery.kind.value,
            step=self.shard.now().state.step,
            rank=rank,
            ranks=recovery.world.size,
            seconds=round(seconds, 3),
        )

    def end(self, reason: str) -> None:
        """End the waits of a recovery. From any thread."""
        meeting = self._meeting
        if meeting is not None:
            meeting.end(reason)
        self.sender.interrupt(reason)
        self.groups.abort(reason)

    def close(self) -> None:
        """Close the connections of the last meeting."""
        if self._meeting is not None:
            self._meeting.close()

    # ---- the meeting

    def _meet(self, plan: QuorumPlan) -> Meeting:
        self.close()
        link, settings = self.member.link, self.member.settings
        self._meeting = Meeting(
            plan,
            job=settings.job,
            token=self.member.token,
            key_values=link.key_values,
            own_address=link.address,
            timeout=self.timeout,
        )
        if reason := self.ended():
            self._meeting.end(reason)
        self.agreement.meeting = self._meeting
        return self._meeting

    def _holding(self) -> Holding:
        held, rebuilt = self.shard.held, self.shard.rebuilt
        shards = []
        if held is not None and (rebuilt is None or rebuilt.world.number != held.world.number):
            shards.append(Shard(held.world, held.rank, held.state, self.shard.voted))
        if rebuilt is not None:
            shards.append(Shard(rebuilt.world, rebuilt.rank, rebuilt.state, trial=True))
        return Holding(
            self.member.replica_id,
            self.member.settings.rank,
            self.domain,
            self.server.address,
            tuple(shards),
            self.keeper.copies(),
            self.shard.whole,
        )

    # ---- the shard

    def _built(self, *, muted: bool) -> Built:
        random = random_state()
        with (
            self.member.link.activity.section("build()", self.build_timeout.total_seconds()),
            self.groups.muted() if muted else contextlib.nullcontext(),
        ):
            built = Built.of(self.build(self.groups.mesh()))
        built.optimizer.register_step_pre_hook(self.shard.refuse_step)
        if muted and self.shard.held is not None:
            restore_random_state(random)  # build may seed: the numbers of a rank that trains go on
        return built

    def _begun(self, world: World, rank: int) -> Held:
        """Build the model for the first step."""
        held = self._new(world, rank)
        if self.init is not None:
            self.init(held.built.model)
        self.shard.note_buffers(held)
        return held

    def _new(self, world: World, rank: int) -> Held:
        """Build the model at step 0. All ranks do so at once, so that they may communicate."""
        self.shard.restart_random()
        self.shard.held = self.shard.rebuilt = None
        self.shard.voted = 0
        built = self._built(muted=False)
        return Held(world, rank, State(0, f"{NEW}one-copy"), built, RankState(built.model, built.optimizer))

    def _resumed(self, found: StoredShards, world: World, rank: int) -> tuple[Held, str]:
        """Build the model, and load the shard of this rank from a checkpoint. Return it, and why it does not fit."""
        held = self._new(world, rank)
        found.seconds = max(found.seconds, self.build_timeout.total_seconds() / RANK_ROUNDS)  # others may still build
        try:
            found.load(held, self.shard)
        except StateMismatch as error:
            return held, (
                f"durable checkpoint does not fit: {error}; return the same model and optimizer, or pass resume=False "
                f"(KEEPSTEP_RESUME=0) to begin at step 0"
            )
        self.checkpoints.resumed(held, found)
        return held, ""

    def _brought_to_target(self, recovery: Recovery, holdings: Sequence[Holding], rank: int) -> Held:
        """Return the shard of this rank at the target."""
        previous, target, shard = recovery.previous, recovery.target, self.shard
        assert previous is not None
        assert target is not None
        own = next(index for index, one in enumerate(holdings) if one.address == self.server.address)
        if shard.rebuilt is not None and previous.number == shard.rebuilt.world.number:
            shard.take(shard.rebuilt)  # another rank has learned that all shards of it are whole
            shard.voted = 0
        shard.rebuilt = None
        reader = ShardReader(self.member.token, previous.number, target, self.timeout.total_seconds(), self.ended)
        sources = Sources(recovery, holdings, reader, self.server)
        source = next((one for one in recovery.sources if one.holder == own and one.way is not Way.COPY), None)
        served = None
        if source is not None:
            self._settle(recovery, source, sources, own)
            served = self._served(shard.now(), previous.number, source.rank)
        with serving(self.server, served):
            held, problem = shard.now() if rank not in recovery.building else None, ""
            if held is None:
                try:
                    held = self._read(recovery, sources, own, rank, target)
                except OtherModelError as error:
                    problem = str(error)
            self.agreement.of_recovery(recovery, holdings, held, problem)  # then all have read
            assert held is not None
        if source is None:
            shard.held = None  # it is of an older state: no rank may read it, or train from it
        held.world, held.rank = recovery.world, rank
        return held

    def _settle(self, recovery: Recovery, source: Source, sources: Sources, own: int) -> None:
        """Bring a shard that this rank has to the target."""
        shard, whole = self.shard, self.shard.whole
        target, shared = recovery.target, recovery.shared == own
        assert target is not None
        build = None if recovery.kind is Kind.RESIZED else lambda: self._built(muted=True)
        shard.settle(target, forward=source.way is Way.FORWARD, build=build)
        if not shared and (source.way is Way.FORWARD or not whole):
            shard.load_others(shard.now(), sources.shared()["shared"])
        shard.whole = True

    def _served(self, held: Held, number: int, rank: int) -> Served:
        queued_work(held.tensors.device)()  # other threads read the shard
        return Served(
            *(number, rank, held.state, held.tensors.names_of_slices()),
            slice_of=held.tensors.base,
            end=held.end(),
            shared={name: one.state_dict() for name, one in self.shard.others(held.built).items()},
            boxes=held.tensors.boxes,
        )

    def _read(self, recovery: Recovery, sources: Sources, own: int, rank: int, target: State) -> Held:
        """Build the model, and read the shard of this rank."""
        with ThreadPoolExecutor(1, thread_name_prefix="keepstep-reading") as pool:
            coming = pool.submit(sources.shared)
            whole = pool.submit(sources.shard_of, rank) if recovery.kind is Kind.REPLACED else None
            built = self._built(muted=True)  # in the meantime
        tensors = RankState(built.model, built.optimizer)
        held = Held(recovery.world, rank, target, built, tensors)
        shared = coming.result()
        if whole is not None:
            shard, rest = whole.result()
            end = rest["end"]
        else:
            shard, end = sources.cut_again(tensors, own), shared["end"]
        options = end["options"]
        if len(shared["end"]["options"]) == len(options):
            options = shared["end"]["options"]  # those of a copy are of before the schedulers
        tensors.load([shard], options, given_away=True)
        tensors.load_buffers(end["buffers"])
        self.shard.load_others(held, shared["shared"])
        if recovery.kind is Kind.REPLACED:
            self.shard.continue_random(end["random"])
        self.shard.note_buffers(held)
        return held

    # ---- the copies

    def _connect_copies(self, recovery: Recovery, holdings: Sequence[Holding], held: Held) -> None:
        """Connect to the keepers of this rank, and fill those that are new."""
        world = recovery.world
        at = {(one.replica_id, one.group_rank): one.address for one in holdings}
        fills = {keeper for rank, keeper in recovery.fills if rank == held.rank}
        seat, group_rank = divmod(held.rank, world.ranks_per_seat)
        chosen = {
            world.seats[keeper].replica_id: (
                at[world.seats[keeper].replica_id, group_rank],
                world.rank(keeper, group_rank) in fills,
            )
            for keeper in keepers(world, seat, self.copies)
        }
        replayed = self.shard.replays(held)
        self.sender.connect(held.tensors, Membership(world.number, held.rank, world.formed), chosen, whole=not replayed)
        if recovery.kind is Kind.RESIZED:
            self.sender.fill(held.state, held.end)
            self.sender.filled()

    def kept(self) -> set[tuple[int, int]]:
        """Return the worlds and ranks of which this process keeps copies."""
        world = self.shard.now().world
        own = world.seat_of(self.member.replica_id)
        return {
            (world.number, world.rank(seat, self.member.settings.rank))
            for seat in range(len(world.seats))
            if own in keepers(world, seat, self.copies)
        }


def _lost_text(recovery: Recovery, copies: int) -> str:
    previous = recovery.previous
    assert previous is not None

    def name(seat: int) -> str:
        return previous.seats[seat].replica_id

    seats = sorted({rank // previous.ranks_per_seat for rank in recovery.missing})
    of = {seat: " and ".join(map(name, keepers(previous, seat, copies))) or "none" for seat in seats}
    lost = "; ".join(f"{name(seat)} (kept by {of[seat]})" for seat in seats)
    return (
        f"shards are lost at step {recovery.given_up}, together with all copies of them: {lost}; no durable checkpoint "
        f"has them; set durable_every to resume from one, and copies=2 to survive this"
    )
