"""The shard and the copies that a rank has, which it tells the others after a change of members."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.one_copy.core.world import Seat, World
from keepstep_mesh.protocol.lineage import committed, worth
from keepstep_mesh.protocol.membership import Lineage


@dataclass(frozen=True, slots=True)
class State:
    """Identity of a state: equal ones of the ranks of a world fit together."""

    step: int
    """Number of committed steps."""
    lineage: Lineage
    """As in ``protocol.lineage``: names the quorum of the last commit."""

    @property
    def worth(self) -> tuple[int, ...]:
        """Sort key: the job continues from the greatest."""
        return worth(self)

    def after(self, quorum_id: int) -> State:
        """Return the state after a step that is committed in a quorum."""
        return State(self.step + 1, committed(self.lineage, quorum_id))


@dataclass(frozen=True, slots=True)
class Copy:
    """The states of one rank that a keeper can rebuild."""

    world: int
    """Number of the world."""
    rank: int
    """In that world."""
    states: tuple[State, ...]
    """That can be rebuilt, oldest first."""
    committed: State | None = None
    """The newest state of which the keeper knows that it was committed: its owner has sent a part of it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of one rank of a world."""

    world: World
    rank: int
    """In ``world``."""
    state: State
    voted: int = 0
    """quorum_id in which its holder voted for the step after ``state``, with gradients that it still has; 0: none."""
    trial: bool = False
    """Whether its holder does not know yet that all ranks of the world have their shards."""

    @property
    def next_state(self) -> State | None:
        """The state to which the gradients of its holder lead; None: it has none."""
        return self.state.after(self.voted) if self.voted else None


@dataclass(frozen=True, slots=True)
class Holding:
    """The shards and the copies of one rank, and the address at which others read them."""

    replica_id: str
    group_rank: int
    domain: str
    """Failure domain of its member, such as the name of the host."""
    address: str
    """``host:port`` at which its shards and its copies are read."""
    shards: tuple[Shard, ...] = ()
    """At most one of each world."""
    copies: tuple[Copy, ...] = ()
    whole: bool = True
    """Whether the script has gone through its step to the end, so that schedulers and samplers fit its shard too."""

    @property
    def seat(self) -> Seat:
        """Of its member."""
        return Seat(self.replica_id, self.domain)
