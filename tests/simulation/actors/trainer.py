"""A rank of a member, in virtual time: its shard, the copies that it keeps, steps, and recoveries.

The decisions are those of ``keepstep.one_copy.core``. This does with symbols what ``job``, ``world_recovery``,
``copy_sender`` and ``keeper`` do with bytes, message by message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.one_copy.core.holding import State
from keepstep.one_copy.core.recovery_plan import Kind, Recovery, Source, Way
from keepstep.one_copy.core.world import World, keepers, unkept
from keepstep.one_copy.reporting.shard_reports import ShardReports
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.lineage import NEW
from tests.simulation.actors.copies import BEGUN, OWN, REFUSED, CopyKeeper, CopyLink
from tests.simulation.virtual.network import FIN
from tests.support.models.symbolic_copies import (
    Attempt,
    Message,
    Rank,
    base_messages,
    kept_by,
    step_messages,
)

if TYPE_CHECKING:
    from tests.simulation.actors.member import Member

WAIT_SECONDS = 15.0
"""Longest wait for a peer."""
UNFIT_SECONDS = 0.5
NO_SEAT = 1 << 62
BEGIN = State(0, f"{NEW}one-copy")


class Trainer:
    """One rank. ``idle``: it asks for a quorum."""

    def __init__(self, member: Member, group_rank: int) -> None:
        self.member, self.group_rank = member, group_rank
        self.sim, self.random, self.shards = member.sim, member.random, member.shards
        self.model = Rank(member.replica_id, group_rank, self.shards.domain_of(member.name))
        self.idle = self.covered = self.may_leave = True
        self.gone = self.refuses = False
        self.failures = self.commits = 0
        self.exposed: dict[str, str] = {}
        """As in ``CopySender``."""
        self.broken = False
        self.quorum_id = 0
        self.recovery: Recovery | None = None
        self.reports = ShardReports(
            *(member.replica_id, group_rank, lambda told: member.report(group_rank, told)),
            exposed=lambda: self.exposed,
            copies_bytes=lambda: 0,
            copies=self.shards.copies,
        )
        self._run = self._waits = 0
        """Count attempts and recoveries, and what is waited for."""
        self._links: list[CopyLink] = []
        self.keeper = CopyKeeper(self)
        self._queue: list[Message] = []
        self._pumping = False
        self._fill = self._done = False
        self._turn = self._attempt = 0
        self._ready: tuple[int, int, State] | None = None
        """World, rank and state of the shard that it serves."""
        self._readers: list[tuple[Trainer, int, tuple[int, int, State]]] = []
        self._unread = 0

    # ---- what others see

    @property
    def step(self) -> int:
        return self.model.step

    @property
    def _own(self) -> tuple[World, int, State]:
        shard = self.model.shards[-1][0]
        return shard.world, shard.rank, shard.state

    @property
    def lets_go(self) -> bool:
        """As in ``OneCopy``: whether the member leaves now if it was ordered to."""
        if not self.model.shards or not self.broken:
            return self.may_leave
        world, names = self._own[0], self.member.lost_members.get(self.quorum_id, set())
        lost = {seat for seat, one in enumerate(world.seats) if one.replica_id in names}
        copies = self.shards.copies
        return self.covered and unkept(world, {*lost, self._seat}, copies) == unkept(world, lost, copies)

    def _check(self) -> None:
        shard, history = self.model.shards[-1]
        self.shards.same(shard.state, history)

    @property
    def _seat(self) -> int:
        world, rank, _ = self._own
        return rank // world.ranks_per_seat

    def asks(self) -> RankAsk:
        state = self.model.shards[0][0].state if self.model.shards else State(0, f"{NEW}{self.member.replica_id}")
        return RankAsk(
            request=0,
            step=state.step,
            lineage=state.lineage,
            shrink_only=False,
            commit_failures=max(self.failures, 1 if self.broken else 0),
            timeout_ms=0,
            final=self.sim.last_step is not None and state.step >= self.sim.last_step,
            multiple=self.shards.multiple,
            sharded=True,
        )

    # ---- running

    def vanish(self) -> None:
        """Die. The kernel ends the connections, and what is on its way arrives or is lost."""
        self.gone = True
        self._run += 1
        for link in self._links:
            self._end(link)
        self.keeper.end_before(None)
        self.shards.gatherings.breaks(self.quorum_id)

    def _end(self, link: CopyLink) -> None:
        if self.random.random() < 0.5:
            link.connection.cut()
        else:
            link.connection.close(link)

    def _later(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        self.member.soon(delay, self._go_on, self._run, act, args)

    def _go_on(self, run: int, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if run == self._run and not self.gone:
            act(*args)

    def _wait(self) -> None:
        """Fail if nothing else is waited for within the time."""
        self._waits += 1
        self._later(WAIT_SECONDS, self._overdue, self._waits)

    def _overdue(self, waits: int) -> None:
        if waits == self._waits and not self.idle:
            self.fail("timeout")

    def fail(self, reason: str) -> None:
        """End the attempt or the recovery, and ask for another quorum."""
        if self.idle or self.gone:
            return
        self.sim.note(f"{self.member.replica_id}/{self.group_rank} fails: {reason}")
        self.broken = True
        self.failures += 1
        self.shards.gatherings.breaks(self.quorum_id)
        self._rest()

    def _rest(self) -> None:
        self._run += 1
        self._queue, self._ready, self._readers, self._done, self._pumping = [], None, [], False, False
        self.idle = True
        self.member.soon(0.002 + 0.01 * self.random.random(), self.member.ask)

    def hear_of_loss(self, quorum_id: int) -> None:
        if quorum_id == self.quorum_id:
            self.fail("a member is lost")

    def _gather(self, what: str, value: Any, then: Callable[[list[Any]], None], facts: Any = None) -> None:
        """Exchange values with all ranks of the quorum."""
        self._wait()
        self.shards.gatherings.join(self, (self.quorum_id, what), value, facts, self._run, then)

    def gathered(self, run: int, then: Callable[[list[Any]], None], values: list[Any] | None) -> None:
        """The exchange has ended; None: it failed."""
        if run != self._run or self.gone:
            return
        if values is None:
            self.fail("a peer is gone")
        elif self.quorum_id in self.member.lost and self.random.random() < 0.5:
            self.fail("a member is lost")
        else:
            then(values)

    # ---- quorums

    def answered(self, plan: QuorumPlan) -> None:
        """A quorum has formed."""
        if self.gone:
            return
        self._run += 1
        self._plan = plan
        if plan.quorum_id == self.quorum_id and not self.broken:
            self._begin_attempt()
            return
        self.quorum_id, self._attempt = plan.quorum_id, 0
        for link in self._links:
            self._end(link)
        self._links = []
        if plan.quorum_id in self.member.lost:
            self._later(0.001, self.fail, "a member is lost already")
            return
        self._gather("meeting", (self, self.model), self._plan_recovery)

    def _plan_recovery(self, met: list[tuple[Trainer, Rank]]) -> None:
        order = {replica_id: place for place, replica_id in enumerate(self._plan.replica_ids)}
        met = sorted(met, key=lambda one: (order[one[1].name], one[1].group_rank))
        self._met = [trainer for trainer, _ in met]
        recovery = self.recovery = self.shards.plan(self.quorum_id, [rank for _, rank in met])
        if recovery.kind is Kind.UNFIT:
            self._later(UNFIT_SECONDS, self.fail, "the members do not fill the mesh")
        elif recovery.kind is Kind.LOST:
            self.reports.lost(self.quorum_id, recovery.given_up)
            self.shards.over = True
            self.sim.time.stop()
        else:
            self._gather("configured", None, self._configured)

    def _rank_in(self, world: World) -> int:
        seat = world.seat_of(self.member.replica_id)
        assert seat is not None
        return world.rank(seat, self.group_rank)

    def _configured(self, _: list[Any]) -> None:
        recovery = self.recovery
        assert recovery is not None
        rank = self._rank_in(recovery.world)
        if recovery.kind is Kind.FRESH:
            self.model = replace(self.model, shards=(), attempt=(0, 0))
            self._have(rank, BEGIN, ())
            self._connect_copies()
            return
        previous, target = recovery.previous, recovery.target
        assert previous is not None
        assert target is not None
        own = self._met.index(self)
        source = next((one for one in recovery.sources if one.holder == own and one.way is not Way.COPY), None)
        # a second shard that is not the source is dropped
        shards = tuple(one for one in self.model.shards if not one[0].trial)
        if source is not None:
            self.model = self.model.settled(previous, source, target)
            self._check()
            self._ready = previous.number, source.rank, target
            for reader, run, wanted in self._readers:
                self.serve(reader, run, wanted)
            self._readers = []
        else:
            self.model = replace(self.model, shards=shards)
        self._source = source
        if rank in recovery.building:
            sources = [recovery.sources[rank]] if recovery.kind is Kind.REPLACED else list(recovery.sources)
            self._unread = len(sources)
            self._wait()
            for one in sources:
                self._later(0.001 + 0.005 * self.random.random(), self._read, one)
        else:
            self._gather("read", None, self._all_have_read)

    # ---- reading shards

    def _read(self, source: Source) -> None:
        recovery, holder = self.recovery, self._met[source.holder]
        assert recovery is not None
        assert recovery.previous is not None
        assert recovery.target is not None
        if self.sim.mesh.is_partitioned(self.member.name, holder.member.name):
            self._later(0.05, self._read, source)
        elif holder.gone:
            self.fail("a source is gone")
        elif source.way is Way.COPY:
            self._later(0.002, self._read_copy, holder, source)
        else:
            wanted = recovery.previous.number, source.rank, recovery.target
            holder.member.act(holder.serve, (self, self._run, wanted))

    def _read_copy(self, holder: Trainer, source: Source) -> None:
        recovery = self.recovery
        assert recovery is not None
        assert recovery.previous is not None
        assert recovery.target is not None
        copy = holder.model.copies.get((recovery.previous.number, source.rank))
        if holder.gone or copy is None or recovery.target not in copy.told.states:
            self.fail("a copy is gone")
        else:
            self._have_read(copy.rebuild(recovery.target))

    def serve(self, reader: Trainer, run: int, wanted: tuple[int, int, State]) -> None:
        """Send the shard, or wait until it is at that state."""
        if self._ready != wanted:
            self._readers.append((reader, run, wanted))
            return
        history = next(history for shard, history in self.model.shards if shard.world.number == wanted[0])
        reader.member.soon(0.001 + 0.02 * self.random.random(), reader._go_on, run, reader._have_read, (history,))

    def _have_read(self, history: tuple[Attempt, ...]) -> None:
        recovery = self.recovery
        assert recovery is not None
        assert recovery.target is not None
        self.shards.same(recovery.target, history)
        self._unread -= 1
        if not self._unread:
            self._read_history = history
            self._gather("read", None, self._all_have_read)

    def _all_have_read(self, _: list[Any]) -> None:
        recovery = self.recovery
        assert recovery is not None
        assert recovery.target is not None
        self._ready = None
        rank = self._rank_in(recovery.world)
        if self._source is None:
            self.model = replace(self.model, shards=())
        if rank in recovery.building:
            self._have(rank, recovery.target, self._read_history)
        else:
            ((shard, history),) = self.model.shards
            self.model = replace(self.model, shards=((replace(shard, world=recovery.world, rank=rank), history),))
        self._connect_copies()

    def _have(self, rank: int, state: State, history: tuple[Attempt, ...]) -> None:
        assert self.recovery is not None
        self.model = self.model.with_trial(self.recovery.world, rank, state, history)
        self._check()

    # ---- copies that it sends

    def _connect_copies(self) -> None:
        recovery = self.recovery
        assert recovery is not None
        world, rank, _ = self._own
        seat = rank // world.ranks_per_seat
        chosen = [world.rank(one, self.group_rank) for one in keepers(world, seat, self.shards.copies)]
        fills = {keeper for one, keeper in recovery.fills if one == rank}
        self._fill = any(one in fills for one in chosen)
        self.exposed = {}
        at = {(one.member.replica_id, one.group_rank): one for one in self._met}
        self._links = []
        self._wait()
        for one in chosen:
            keeper = at[world.seats[one // world.ranks_per_seat].replica_id, self.group_rank]
            link = CopyLink(self, keeper, (world.number, rank), world.formed, fill=self._fill)
            self._links.append(link)
            if keeper.gone:
                self._later(0.005, self.fail, "a keeper is gone")
            else:
                link.connection.send(link, OWN)
        if not self._links:
            self._copies_begun()

    def copies_answered(self, link: CopyLink, message: Any) -> None:
        """A keeper answers."""
        if self.gone or link not in self._links:
            return
        if message is REFUSED and not link.begun:
            self._links.remove(link)
            self.exposed[link.keeper.member.replica_id] = "it refuses"
            if all(one.begun for one in self._links):
                self._copies_begun()
        elif message is FIN or message is REFUSED:
            self.fail("a keeper is gone, or refuses")
        elif message is BEGUN:
            link.begun = True
            if all(one.begun for one in self._links):
                self._copies_begun()
        else:
            link.confirmed.append(message)
            self._see_confirmed()

    def _copies_begun(self) -> None:
        assert self.recovery is not None
        if self.recovery.kind is Kind.RESIZED:
            self._send_bases()
            self._then = self._adopt
            self._wait()
            self._done = True
            self._see_confirmed()
        else:
            self._adopt()

    def _send_bases(self) -> None:
        _, _, state = self._own
        fill, self._fill = self._fill, False
        history = self.model.shards[-1][1]
        self._awaited = [state] if fill else []
        self._send(base_messages(self.shards.slices, state, history, None if fill else self._turn))
        self._turn += 1

    def _send(self, messages: list[Message]) -> None:
        self._queue += messages
        if not self._pumping:
            self._pumping = True
            self._pump()

    def _pump(self) -> None:
        self._pumping = bool(self._queue)
        if self._queue:
            message = self._queue.pop(0)
            for link in self._links:
                link.connection.send(link, message)
            self._later(0.01 * self.random.random(), self._pump)
        else:
            self._see_confirmed()

    def _see_confirmed(self) -> None:
        """Go on when all keepers have confirmed what was sent."""
        if self._done and not self._queue and all(link.confirmed == self._awaited for link in self._links):
            self._done, self._awaited = False, []
            for link in self._links:
                link.confirmed = []
            self._then()

    # ---- the end of a recovery

    def _adopt(self) -> None:
        self._gather("adopt", None, self._adopted)

    def _adopted(self, _: list[Any]) -> None:
        recovery = self.recovery
        assert recovery is not None
        world, rank, state = self._own
        self.model = self.model.adopted(world, rank)
        self.keeper.end_before(world.formed)
        self.broken = False
        self.covered = self.may_leave = recovery.kind is Kind.FRESH
        self.reports.recovered(recovery, state.step, 0.1)
        self._begin_attempt()

    # ---- a step

    def _begin_attempt(self) -> None:
        if self._plan.finishing:
            self._later(0.01, self._rest)
            return
        self._attempt += 1
        self._send_bases()
        self._later(0.05 + 0.2 * self.random.random(), self._end_backward)

    def _end_backward(self) -> None:
        world, rank, state = self._own
        facts = world, state, self.model.shards[0][1], self._attempt
        self._gather(f"gradients {self._attempt}", rank, self._finish_copies, facts)

    def _finish_copies(self, ranks: list[int]) -> None:
        world, _, state = self._own
        if sorted(ranks) != list(range(world.size)):
            self.sim.violated(f"ranks {sorted(ranks)} train in a world of {world.size}")
        following = state.after(self.quorum_id)
        self._awaited = [*self._awaited, following]
        self._send(step_messages(self.shards.slices, following, (self.quorum_id, self._attempt)))
        self._then, self._done = self._vote, True
        self._wait()
        self._see_confirmed()

    def _vote(self) -> None:
        if self.quorum_id in self.member.lost:
            self.fail("a member is lost")
            return
        self.model = self.model.voting(self.quorum_id, (self.quorum_id, self._attempt))
        ok, self.refuses = not self.refuses, False
        leaves = self.member.leaving
        vote = ok * (1 + self.reports.covered), leaves, self._seat if leaves else NO_SEAT
        self._gather(f"vote {self._attempt}", vote, self._decided)

    def _decided(self, votes: list[tuple[int, bool, int]]) -> None:
        world, _, _ = self._own
        result, all_leave, first = (min(values) for values in zip(*votes, strict=True))
        if not result:
            ((shard, history),) = self.model.shards
            self.model = replace(self.model, shards=((replace(shard, voted=0), history),), attempt=(0, 0))
        else:
            kept = kept_by(world, self.member.replica_id, self.group_rank, self.shards.copies)
            self.model = self.model.committed(self.quorum_id, (self.quorum_id, self._attempt), kept)
            self.keeper.forget(kept)
            self.failures = 0
            self.commits += 1
            self.covered = result > 1
            self.may_leave = bool(all_leave) or (self.covered and first == self._seat)
            self.shards.committed(self, world)
            self.reports.committed(covered=self.covered)
        self._rest()
