"""Compute from a quorum what a group does in its step. Pure: the plans that all members compute fit together.

Rules:

* Equal (step, lineage) means equal weights. ``protocol.lineage`` says which of them is the reference state. The groups
  that hold it are the *cohort*; all other groups heal.
* The k-th healing group heals from the k-th of the cohort, round robin; each failed attempt moves it on by one.
* With ``brings_late``, a group that is behind with a state that it trained itself does not heal. It is *late*: the
  collectives of the step bring it the state of the cohort.
* A group that *follows* the cohort takes part without weights, which arrive in the background: it does not heal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from keepstep_mesh.protocol.lineage import NEW, following, is_committed, is_diverged, is_torn, origin, reference_state
from keepstep_mesh.protocol.membership import Lineage, Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum
from keepstep_mesh.protocol.records import copier

ROTATING = 2
"""``MemberInfo.rendezvous`` of members that rotate the host; older ones take the first of the cohort."""


Participation = tuple[int | None, int]
"""The number of a group among those that take part in a step (None: it does not), and their number."""


class WorldSizeMode(Enum):
    """How many groups take part in a step.

    DYNAMIC: all groups of the quorum. FIXED_WITH_SPARES: the first ``min_replica_size`` groups; the others are spares,
    which contribute zeros.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, slots=True)
class QuorumPlan:
    """One group's part in one step."""

    quorum: Quorum
    """The quorum that the plan follows from."""
    replica_rank: int
    """Index of this group in ``members``."""
    cohort: tuple[int, ...]
    """replica_ranks that hold the reference state."""
    healing: tuple[int, ...]
    """replica_ranks that heal: all others but ``late`` and ``followers``."""
    max_replica_rank: int | None
    """Index of this group in ``cohort``; None while it is behind."""
    max_step: int
    lineage: Lineage
    source: int | None
    """replica_rank that this group heals from; None when it does not heal."""
    destinations: tuple[int, ...]
    """replica_ranks that heal from this group."""
    beside: tuple[int, ...] = ()
    """replica_ranks that heal from the same source as this group, and its own; empty when it is in the cohort."""
    attempt: int = 0
    """Number of the group's request, as its rank 0 counts them; part of the key of a vote."""
    heal_timeout_ms: int = 0
    """How long the next quorum waits for a group that heals; 0: unknown."""
    late: tuple[int, ...] = ()
    """replica_ranks that are behind, and that the collectives of the step bring to the reference state."""
    followers: tuple[int, ...] = ()
    """replica_ranks that take part without weights, and contribute zeros."""

    @property
    def epoch(self) -> int:
        return self.quorum.epoch

    @property
    def quorum_id(self) -> int:
        return self.quorum.quorum_id

    @property
    def members(self) -> tuple[Member, ...]:
        """Sorted by replica_id; a replica_rank is an index into it. Read only ids and ``info``: steps may be old."""
        return self.quorum.listed

    @property
    def verify(self) -> bool:
        """Whether the groups of the cohort send the root digest of their state with the next request."""
        return self.quorum.verify

    @property
    def allow_heal(self) -> bool:
        """False: no group heals in this step, and all members take part as they are."""
        return self.quorum.allow_heal

    @property
    def finishing(self) -> bool:
        """Whether groups finish in this quorum: no member reduces or commits anything, and those behind heal."""
        return self.quorum.finishing

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
    def behind(self) -> bool:
        """Whether this group does not hold the reference state."""
        return self.max_replica_rank is None

    @property
    def first_step(self) -> bool:
        """Whether no member has committed a step of the job; then all heals come before the forward pass."""
        return self.max_step == 0 and (not self.healing or not any(member.step for member in self.members))

    @property
    def reference_batches(self) -> int:
        """``batches_committed`` of the reference state; 0: unknown."""
        return self.members[self.cohort[0]].batches_committed

    @property
    def follows(self) -> bool:
        """Whether this group takes part without weights."""
        return self.replica_rank in self.followers

    @property
    def diverged(self) -> bool:
        """Whether this group's weights were found to differ from those of the cohort."""
        return self.heal and is_diverged(self.members[self.replica_rank].lineage)

    @property
    def torn(self) -> bool:
        """Whether this group's request said that its state is torn; the state of a single rank may be whole."""
        return is_torn(self.members[self.replica_rank].lineage if self.heal else self.lineage)

    @property
    def replica_ids(self) -> tuple[str, ...]:
        return tuple(member.replica_id for member in self.members)

    def participation(self, mode: WorldSizeMode, min_replica_size: int, *, healed_before: bool) -> Participation:
        """Return this group's number among those that take part (None: it does not), and their number.

        Args:
            mode: see ``WorldSizeMode``.
            min_replica_size: of the job.
            healed_before: whether groups heal before the forward pass or not at all, so that all take part.
        """
        rank, world = self.max_replica_rank, self.max_world_size
        if healed_before:
            rank, world = self.replica_rank, self.replica_world_size
        if self.finishing:
            rank = None
        if mode is WorldSizeMode.FIXED_WITH_SPARES:
            world = min(world, min_replica_size)
            if rank is not None and rank >= world:
                rank = None
        return rank, world

    @property
    def store_address(self) -> str:
        """Return the address of the store over which the members build their process groups.

        Each quorum_id takes another member's store, so that an unreachable host fails a single rebuild.
        """
        rotates = all(member.info.rendezvous >= ROTATING for member in self.members)
        host = self.quorum_id % len(self.members) if rotates else self.cohort[0]
        return self.members[host].info.store_address


_next_plan = copier(QuorumPlan, QuorumPlan, "quorum", "max_step", "lineage", "attempt", "heal_timeout_ms")


def make_plan(
    quorum: Quorum,
    replica_id: str,
    previous: QuorumPlan | None = None,
    *,
    attempt: int = 0,
    heal_timeout_ms: int = 0,
    brings_late: bool = False,
) -> QuorumPlan:
    """Return the part of ``replica_id`` in ``quorum``.

    O(members) for a new member list, O(1) for the list of ``previous``.

    Args:
        quorum: the lighthouse's answer.
        replica_id: of this group.
        previous: the plan of the step before; what has not changed is not computed again.
        attempt, heal_timeout_ms: as in the plan.
        brings_late: see the rules at the top; equal in all groups.

    Raises:
        ValueError: ``replica_id`` is not a member of the quorum.
    """
    members = quorum.listed
    if quorum.uniform and previous and members is previous.members and not (previous.healing or previous.late):
        return _next_plan(
            previous,
            quorum=quorum,
            max_step=quorum.step,
            lineage=quorum.lineage,
            attempt=attempt,
            heal_timeout_ms=heal_timeout_ms,
        )
    ids = [member.replica_id for member in members]
    if replica_id not in ids:
        raise ValueError(f"quorum {quorum.quorum_id} has no member {replica_id}; its members are {', '.join(ids)}")
    replica_rank = ids.index(replica_id)
    healing: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    followers: tuple[int, ...] = ()
    if quorum.uniform:  # the steps in the list are old, and no group heals
        step, lineage, cohort = quorum.step, quorum.lineage, tuple(range(len(members)))
    else:
        step, lineage = reference_state(members)
        holds = [(m.step, m.lineage) == (step, lineage) for m in members]
        cohort = tuple(rank for rank, held in enumerate(holds) if held)
        healing = tuple(rank for rank, held in enumerate(holds) if not held)
        if brings_late:
            late = tuple(rank for rank in healing if _is_late(members[rank], step, lineage))
            healing = tuple(rank for rank in healing if rank not in late)
        elif quorum.allow_heal and not quorum.finishing:
            here = step, following(lineage)
            followers = tuple(rank for rank in healing if (members[rank].step, members[rank].lineage) == here)
            healing = tuple(rank for rank in healing if rank not in followers)
    sources = {rank: cohort[(k + members[rank].commit_failures) % len(cohort)] for k, rank in enumerate(healing)}
    source = sources.get(replica_rank)
    return QuorumPlan(
        quorum=quorum,
        replica_rank=replica_rank,
        cohort=cohort,
        healing=healing,
        max_replica_rank=cohort.index(replica_rank) if replica_rank in cohort else None,
        max_step=step,
        lineage=lineage,
        source=source,
        destinations=tuple(rank for rank in healing if sources[rank] == replica_rank),
        beside=tuple(rank for rank in healing if sources[rank] == sources.get(replica_rank)),
        attempt=attempt,
        heal_timeout_ms=heal_timeout_ms,
        late=late,
        followers=followers,
    )


def plan_of_closed_job(step: int, lineage: Lineage) -> QuorumPlan:
    """Return the plan of a group that loads the final state of its job from a relay. It takes part in no step.

    Args:
        step, lineage: of the final state.
    """
    alone = Member("", step, lineage, commit_failures=0, shrink_only=False, info=MemberInfo(""))
    quorum = Quorum(0, 0, 0, 0, 0, step, lineage, 0, uniform=True, listed=(alone,), finishing=True)
    return QuorumPlan(
        quorum=quorum,
        replica_rank=0,
        cohort=(0,),
        healing=(),
        max_replica_rank=None,
        max_step=step,
        lineage=lineage,
        source=0,
        destinations=(),
    )


def _is_late(member: Member, step: int, lineage: Lineage) -> bool:
    """Return whether the state of ``member`` is an earlier one of the history that led to (step, lineage).

    A group that has just started is not late, even with a checkpoint: it has trained nothing since.
    """
    same_history = origin(member.lineage).resumed == origin(lineage).resumed
    shared = isinstance(member.lineage, str) and member.lineage.startswith(NEW)  # the weights that the job began with
    began = shared and member.lineage != f"{NEW}{member.replica_id}"
    return (is_committed(member.lineage) or began) and member.step < step and same_history
