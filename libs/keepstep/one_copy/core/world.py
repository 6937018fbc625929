"""The world of a job with one copy: its members in their seats, and who keeps the copies of whom."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """One member of the world."""

    replica_id: str
    domain: str
    """Its failure domain, such as the name of its host: the members of one domain may fail together."""


@dataclass(frozen=True, slots=True)
class World:
    """The layout of a model that exists once: which member holds which shards.

    The number stays while members are replaced in their seats, and changes when the shards are cut again.
    """

    number: int
    """quorum_id of the quorum in which the shards were cut."""
    formed: int
    """quorum_id of the quorum in which the members took their seats."""
    seats: tuple[Seat, ...]
    ranks_per_seat: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.seats) * self.ranks_per_seat

    def rank(self, seat: int, group_rank: int) -> int:
        """Return the rank in the world of a rank of the member in ``seat``."""
        return seat * self.ranks_per_seat + group_rank

    def seat_of(self, replica_id: str) -> int | None:
        """Return the seat of a member; None: it has none."""
        return next((index for index, seat in enumerate(self.seats) if seat.replica_id == replica_id), None)


def form_world(number: int, members: Sequence[Seat], ranks_per_seat: int, previous: World | None) -> World:
    """Give a seat to each of ``members``.

    If their number fits ``previous``, its members keep their seats, the others take the empty ones in order, and the
    world keeps its number. Otherwise it is a new world: the members of ``previous`` come first, in their order.

    Args:
        number: of the quorum.
        members: of the quorum, in its order; different replica_ids.
        ranks_per_seat: number of ranks of each member.
        previous: the world whose shards the members hold; None: they hold none.
    """
    if previous is None:
        return World(number, number, tuple(members), ranks_per_seat)
    present = {member.replica_id: member for member in members}
    kept = [present.get(seat.replica_id) for seat in previous.seats]
    newcomers = [member for member in members if previous.seat_of(member.replica_id) is None]
    if len(members) != len(previous.seats):
        return World(number, number, (*(seat for seat in kept if seat is not None), *newcomers), ranks_per_seat)
    waiting = iter(newcomers)
    return World(previous.number, number, tuple(seat or next(waiting) for seat in kept), ranks_per_seat)


def keepers(world: World, seat: int, copies: int) -> tuple[int, ...]:
    """Return the seats that keep the copies of ``seat``, in order of preference: at most ``copies``, never itself.

    They are the next seats in a ring, first those of other failure domains than the seat and than each other.
    """
    count = len(world.seats)
    ring = [(seat + step) % count for step in range(1, count)]
    chosen: list[int] = []
    domains = {world.seats[seat].domain}
    for one in ring:
        if world.seats[one].domain not in domains:
            chosen.append(one)
            domains.add(world.seats[one].domain)
    rest = [one for one in ring if one not in chosen]
    own = world.seats[seat].domain
    elsewhere = [one for one in rest if world.seats[one].domain != own]
    return tuple([*chosen, *elsewhere, *(one for one in rest if one not in elsewhere)][:copies])


def unkept(world: World, gone: Collection[int], copies: int) -> set[int]:
    """Return the seats whose shards are lost with the members of the seats ``gone``: those and their keepers."""
    return {seat for seat in gone if all(one in gone for one in keepers(world, seat, copies))}
