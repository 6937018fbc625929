"""From a quorum and who I am to what I do in this step. Pure: the same quorum gives every member a plan that fits.

Rules (SEMANTICS, section 2):

* Equal (step, lineage) means equal weights. ``protocol.lineage`` says which is the reference; who has it is the
  *cohort*, everybody else heals.
* The k-th healing group heals from the k-th of the cohort, round robin; each failed attempt moves it on by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from keepstep_mesh.protocol.lineage import is_diverged, is_torn, reference_state
from keepstep_mesh.protocol.membership import Lineage, Member, Quorum

ROTATING = 2
"""``MemberInfo.rendezvous`` of members that rotate the host; older ones meet at the first of the cohort."""


class WorldSizeMode(Enum):
    """How many groups take part in a step.

    DYNAMIC: all that are there. FIXED_WITH_SPARES: at most ``min_replica_size``; the rest contribute zeros and stand
    by.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, slots=True)
class QuorumPlan:
    """One group's part in one step."""

    epoch: int
    quorum_id: int
    members: tuple[Member, ...]
    """Sorted by replica_id; a replica_rank is an index into it. Read only ids and ``info``: steps may be old."""
    replica_rank: int
    cohort: tuple[int, ...]
    """replica_ranks that hold the reference state."""
    healing: tuple[int, ...]
    """All other replica_ranks: they heal."""
    max_replica_rank: int | None
    """Place within the cohort; None while this group heals."""
    max_step: int
    lineage: Lineage
    source: int | None
    """replica_rank that this group heals from; None when it is in the cohort."""
    destinations: tuple[int, ...]
    """replica_ranks that heal from this group."""
    joiners: int
    beside: tuple[int, ...] = ()
    """replica_ranks that heal from the same source as this group, and its own; empty when it is in the cohort."""
    verify: bool = False
    """Whoever is in the cohort says the root digest of its state with the next request."""
    allow_heal: bool = True
    """False: nobody heals in this step, and all members take part as they are."""

    @property
    def replica_world_size(self) -> int:
        return len(self.members)

    @property
    def max_world_size(self) -> int:
        return len(self.cohort)

    @property
    def heal(self) -> bool:
        return self.source is not None

    @property
    def first_step(self) -> bool:
        """Of the job: no member has committed one, so all that heal do so before the forward pass."""
        return self.max_step == 0 and (not self.healing or not any(member.step for member in self.members))

    @property
    def reference_batches(self) -> int:
        """``batches_committed`` of the reference state, for a group that does not hold it; 0: not known."""
        return self.members[self.cohort[0]].batches_committed

    @property
    def diverged(self) -> bool:
        """Its weights were found to differ from those of the cohort."""
        return self.heal and is_diverged(self.members[self.replica_rank].lineage)

    @property
    def torn(self) -> bool:
        """This group's state is of no step, as the group's request said: also where one rank's is whole."""
        return is_torn(self.members[self.replica_rank].lineage if self.heal else self.lineage)

    @property
    def replica_ids(self) -> tuple[str, ...]:
        return tuple(member.replica_id for member in self.members)

    def participation(
        self, mode: WorldSizeMode, min_replica_size: int, *, healed_before: bool
    ) -> tuple[int | None, int]:
        """This group's place among those that take part (None: it does not), and how many they are.

        ``healed_before``: who heals does so before the forward pass, or not at all, so all take part.
        """
        rank, world = self.max_replica_rank, self.max_world_size
        if healed_before:
            rank, world = self.replica_rank, self.replica_world_size
        if mode is WorldSizeMode.FIXED_WITH_SPARES:
            world = min(world, min_replica_size)
            if rank is not None and rank >= world:
                rank = None
        return rank, world

    @property
    def store_address(self) -> str:
        """Where the members meet to build their process groups: at another one of them for each quorum_id.

        So a host that cannot be reached fails one rebuild: the next attempt has a higher quorum_id.
        """
        rotates = all(member.info.rendezvous >= ROTATING for member in self.members)
        host = self.quorum_id % len(self.members) if rotates else self.cohort[0]
        return self.members[host].info.store_address


def make_plan(quorum: Quorum, replica_id: str, previous: QuorumPlan | None = None) -> QuorumPlan:
    """The part of ``replica_id`` in ``quorum``. Raises ValueError when it is no member.

    ``previous``: its plan of the step before; what has not changed is not worked out again. O(members) for a new list,
    O(1) for the list of ``previous``.
    """
    members = quorum.listed
    if quorum.uniform and previous and members is previous.members and not previous.healing:
        return replace(
            previous,
            epoch=quorum.epoch,
            quorum_id=quorum.quorum_id,
            max_step=quorum.step,
            lineage=quorum.lineage,
            joiners=quorum.joiners,
            verify=quorum.verify,
            allow_heal=quorum.allow_heal,
        )
    ids = [member.replica_id for member in members]
    if replica_id not in ids:
        raise ValueError(f"quorum {quorum.quorum_id} has no member {replica_id}; its members are {', '.join(ids)}")
    replica_rank = ids.index(replica_id)
    healing: tuple[int, ...] = ()
    if quorum.uniform:  # what the list says of steps is old, and nobody heals
        step, lineage, cohort = quorum.step, quorum.lineage, tuple(range(len(members)))
    else:
        step, lineage = reference_state(members)
        holds = [(m.step, m.lineage) == (step, lineage) for m in members]
        cohort = tuple(rank for rank, held in enumerate(holds) if held)
        healing = tuple(rank for rank, held in enumerate(holds) if not held)
    sources = {rank: cohort[(k + members[rank].commit_failures) % len(cohort)] for k, rank in enumerate(healing)}
    source = sources.get(replica_rank)
    return QuorumPlan(
        epoch=quorum.epoch,
        quorum_id=quorum.quorum_id,
        members=members,
        replica_rank=replica_rank,
        cohort=cohort,
        healing=healing,
        max_replica_rank=cohort.index(replica_rank) if source is None else None,
        max_step=step,
        lineage=lineage,
        source=source,
        destinations=tuple(rank for rank in healing if sources[rank] == replica_rank),
        joiners=quorum.joiners,
        beside=tuple(rank for rank in healing if sources[rank] == sources.get(replica_rank)),
        verify=quorum.verify,
        allow_heal=quorum.allow_heal,
    )
