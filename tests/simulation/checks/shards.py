"""Rules for the members of a job whose model exists once.

* All ranks of a quorum plan the same recovery, and the plan holds what ``plan_checks`` says.
* Equal states have equal histories: no step counts twice, and no shards of two steps mix.
* When the first rank learns of a commit, all keepers that live can rebuild the shards of that state.
* No committed step is lost, unless a member and its keepers were lost together.
* Copies are bounded.
* Once the faults stop, all members that fit the mesh soon train in one quorum.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

from keepstep.one_copy.core.holding import State
from keepstep.one_copy.core.recovery_plan import Kind, Recovery, plan_recovery
from keepstep.one_copy.core.world import World, keepers
from keepstep.session.session_machine import About
from keepstep_lighthouse.quorum.groups.groups import Groups
from tests.simulation.actors.gatherings import Gatherings
from tests.support.models.plan_checks import check_plan, obtainable
from tests.support.models.symbolic_copies import History, KeptCopy, Rank

if TYPE_CHECKING:
    from tests.simulation.actors.member import Member
    from tests.simulation.actors.trainer import Trainer
    from tests.simulation.simulation import Simulation

COMMITS_AFTER = 3


class ShardChecks:
    """Settings of the job, drawn from the seed, and the checks."""

    def __init__(self, sim: Simulation, seed: int, members: int, *, spares: bool) -> None:
        random = Random(f"one copy {seed}")
        self.ranks, self.multiple = random.choice(((1, 1), (1, 1), (2, 1), (2, 1), (1, 2)))
        self.copies, self.slices = random.choice((1, 1, 2)), random.choice((1, 2, 3))
        self.about = About(groups=members, standby=True) if spares else None
        self.over = False
        """Shards are lost."""
        self.kinds: list[Kind] = []
        self.gatherings = Gatherings(sim)
        self._domains = random.choice((1, 1, 2))
        self._sim = sim
        self._plans: dict[int, tuple[Recovery, list[Rank]]] = {}
        self._decided: dict[tuple[int, int], set[str]] = {}
        """By epoch and quorum: the groups that the lighthouse could have waited for. A lighthouse announces no quorum
        if it is deposed before it has stored it."""
        self._left_out: dict[int, set[str]] = {}
        """Of the quorums that were announced."""
        self._histories: dict[State, History] = {}
        self._learned: dict[State, set[int]] = {}
        """By a committed state: the ranks that have learned of it."""
        self._covered: World | None = None
        """The world in which all ranks last learned of a commit. None: none since members were lost."""
        self._exposed = True
        """Whether copies may be incomplete since then."""
        self._commits_before: dict[str, int] = {}

    def fitting(self, members: int) -> int:
        """Return at most ``members``, as a number that fills the mesh."""
        return max(1, members - members % self.multiple)

    def domain_of(self, name: str) -> str:
        return f"rack {int(name[1:]) // self._domains}"

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self._sim.violated(what)

    # ---- recoveries

    def plan(self, quorum_id: int, ranks: list[Rank]) -> Recovery:
        """Return the plan of a rank, after it was checked."""
        recovery = plan_recovery(
            quorum_id,
            [one.holding() for one in ranks],
            copies=self.copies,
            fits=lambda size: size % (self.multiple * self.ranks) == 0,
        )
        known = self._plans.setdefault(quorum_id, (recovery, ranks))
        self._require(known[0] == recovery, f"the ranks of quorum {quorum_id} plan {known[0]} and {recovery}")
        if known[1] is not ranks or recovery.kind is Kind.UNFIT:
            return recovery
        self.kinds.append(recovery.kind)
        self._sim.note(f"quorum {quorum_id}: {recovery.kind.value} at {recovery.target}, building {recovery.building}")
        seats = {one.replica_id for one in self._covered.seats} if self._covered is not None else set()
        away = seats.difference(one.name for one in ranks)
        returned = any(one.step and one.name not in seats for one in ranks)  # its steps may be given up
        may_lose = self._exposed or returned or len(away) > min(self.copies, len(seats) - 1)
        try:
            check_plan(ranks, recovery, self.copies, may_lose=may_lose)
        except AssertionError as error:
            self._sim.violated(f"the plan of quorum {quorum_id}: {error}")
        self._exposed = True
        if recovery.kind is Kind.LOST:
            self._check_left_out(quorum_id, ranks)
        return recovery

    def decided(self, epoch: int, quorum_id: int, groups: Groups) -> None:
        """A lighthouse forms a quorum. Note the groups that are there, if it knows the keepers of all members."""
        sources = groups.sources._of.values()
        if (epoch, quorum_id) not in self._decided and sources and all(len(one) > 1 for one in sources):
            there = (one for one in groups if one.session is not None and one.excluded is None)
            self._decided[epoch, quorum_id] = {one.replica_id for one in there}

    def announced(self, epoch: int, quorum_id: int) -> None:
        """A lighthouse has stored a quorum, and tells the members."""
        self._left_out.setdefault(quorum_id, self._decided.get((epoch, quorum_id), set()))

    def _check_left_out(self, quorum_id: int, ranks: list[Rank]) -> None:
        """Shards are lost to a quorum. Check that no group that was there has them."""
        left_out = self._left_out.get(quorum_id, set()).difference(one.name for one in ranks)
        others = [process.model for one in left_out for process in self._sim.workers[one].trainers]
        for rank in ranks:
            for shard, _ in rank.shards:
                held = obtainable([*ranks, *others], shard.world, shard.state)
                self._require(not held, f"{sorted(left_out)} have shards, and are not in quorum {quorum_id}")

    def same(self, state: State, history: History) -> None:
        """A shard of this state has this history."""
        known = self._histories.setdefault(state, history)
        self._require(known == history, f"shards at {state} are of {known} and of {history}")
        self._require(len(history) == state.step == len(set(history)), f"{state} counts steps twice: {history}")

    # ---- steps

    def committed(self, trainer: Trainer, world: World) -> None:
        """A rank has learned of a commit."""
        ((shard, history),) = trainer.model.shards
        self.same(shard.state, history)
        learned = self._learned.setdefault(shard.state, set())
        if not learned:
            self._check_copies(world, shard.state, history)
        learned.add(shard.rank)
        if len(learned) == world.size:
            ranks = (self._process(seat.replica_id, group) for seat in world.seats for group in range(self.ranks))
            self._covered, self._exposed = world, any(one.exposed for one in ranks)

    def _check_copies(self, world: World, state: State, history: History) -> None:
        for rank in range(world.size):
            seat, group_rank = divmod(rank, world.ranks_per_seat)
            for keeper in keepers(world, seat, self.copies):
                process = self._process(world.seats[keeper].replica_id, group_rank)
                owner = self._process(world.seats[seat].replica_id, group_rank)
                if process.gone or owner.gone or process.member.replica_id in owner.exposed:
                    continue
                copy = process.model.copies.get((world.number, rank))
                rebuilds = copy is not None and state in copy.told.states and copy.rebuild(state) == history
                who = world.seats[keeper].replica_id
                self._require(rebuilds, f"{who} cannot rebuild rank {rank} at {state}, which is committed")

    def _process(self, replica_id: str, group_rank: int) -> Trainer:
        process: Trainer = self._sim.workers[replica_id].trainers[group_rank]
        return process

    def check_size(self, copy: KeptCopy) -> None:
        self._require(len(copy.gradients) <= self.slices * (self.slices + 2), "a log grows")

    # ---- the end

    def finished(self, member: Member, step: int) -> None:
        for one in member.trainers:
            self._require(one.step == step, f"{member.replica_id} finishes at {one.step}, the job at {step}")

    def faults_stopped(self, workers: Mapping[str, Member]) -> None:
        self._commits_before = {replica_id: one.commits for replica_id, one in workers.items()}

    def recovered(self, latest: Mapping[str, Member], members: tuple[str, ...], most: int) -> bool:
        """Return whether the members of the last quorum train, and no other member could.

        Args:
            latest: the newest incarnations, by name.
            members: of the last quorum.
            most: limit of their number; 0: none.
        """
        living = [one for one in latest.values() if one.alive]
        wanted = min(self.about.groups if self.about else len(latest), most or len(latest))
        training = [one for one in living if one.replica_id in members]
        if len(living) < len(latest) or len(training) != len(members) or len(training) < wanted // self.multiple:
            return False
        if len(training) < wanted - wanted % self.multiple:
            return False
        return all(
            one.commits - self._commits_before.get(one.replica_id, 0) >= COMMITS_AFTER and not one.finished
            for one in training
        )
