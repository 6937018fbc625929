"""Decide which durable checkpoints are due, who uploads them and where, and which one a job resumes from. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.membership import Lineage

MAX_UPLOADERS = 8
"""Groups that upload a share of one checkpoint. The other groups only follow its outcome."""
AVOID_BACKOFF = Backoff(first=30.0, most=600.0)
"""How long no checkpoint is uploaded to a relay that failed, if another relay is there."""
FOLLOWED_PER_SECOND = 100.0
"""Requests of all ranks that follow a checkpoint, at one relay."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed step. All members of its quorum know it alike."""

    epoch: int
    quorum_id: int
    step: int
    """Number of committed steps, with this one."""
    members: tuple[str, ...]
    """replica_ids of the quorum."""

    def checkpoint_id(self, attempt: int = 1) -> str:
        """Return the name of its checkpoint, which no other commit has, in no life of the job.

        Args:
            attempt: number of checkpoints of this commit, with this one.
        """
        world = hashlib.blake2b(repr((self.epoch, self.members)).encode(), digest_size=6).hexdigest()
        return f"step-{self.step}-{self.quorum_id}-{world}{f'.{attempt}' if attempt > 1 else ''}"

    def uploaders(self, every: int = 1, most: int = MAX_UPLOADERS) -> tuple[str, ...]:
        """Return the groups that upload it, in an order that changes with the checkpoint. The first one counts most.

        Args:
            every: number of steps between two checkpoints; 0: none are due by themselves.
            most: number of groups that upload.
        """
        first = self.step // max(1, every) % len(self.members)
        return (*self.members[first:], *self.members[:first])[:most]


Held = tuple[int, Lineage]
"""A state of the job: its number of committed steps, and its lineage. A step number alone may come twice."""


def is_due(held: Held, every: int, saved: Held | None) -> bool:
    """Return whether a checkpoint of a committed state is due.

    After a job has gone back behind its last checkpoint, one of its first step is due at once: that checkpoint is of a
    state that the job has given up, and must not be the newest.

    Args:
        held: the state.
        every: number of steps between two checkpoints; 0: never.
        saved: the state of the last checkpoint that this process staged, or was loaded from; None: none.
    """
    step = held[0]
    went_back = saved is not None and saved[0] >= step
    return every > 0 and step > 0 and held != saved and (went_back or step % every == 0)


def follow_seconds(ranks: int) -> float:
    """Return the pause between two requests of a rank that follows a checkpoint, in a job of so many ranks."""
    return max(0.5, ranks / FOLLOWED_PER_SECOND)


def choose_relays(addresses: Iterable[str], job: str, copies: int) -> list[str]:
    """Return the relays that store the checkpoints of ``job``, by rendezvous hashing.

    A job keeps its relays, so that chunks that did not change are there already. All processes choose alike.
    """

    def weight(address: str) -> bytes:
        return hashlib.blake2b(f"{job} {address}".encode(), digest_size=8).digest()

    return sorted(set(addresses), key=weight, reverse=True)[:copies]


class RelayHealth:
    """Relays that failed, which are avoided for a while. All times are monotonic seconds."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._avoided_until: dict[str, float] = {}

    def failed(self, address: str, now: float) -> None:
        """Note that an upload to a relay failed."""
        self._failures[address] = self._failures.get(address, 0) + 1
        self._avoided_until[address] = now + AVOID_BACKOFF.seconds(self._failures[address])

    def worked(self, address: str) -> None:
        """Note that a relay committed a checkpoint."""
        self._failures.pop(address, None)
        self._avoided_until.pop(address, None)

    def usable(self, addresses: Iterable[str], now: float) -> list[str]:
        """Return the relays that are not avoided now; all of them if each is."""
        addresses = list(addresses)
        return [one for one in addresses if self._avoided_until.get(one, now) <= now] or addresses


@dataclass(frozen=True, slots=True)
class Stored:
    """A committed durable checkpoint at one relay."""

    relay: str
    id: str
    step: int
    quorum_id: int
    ranks: int
    committed: float
    """Unix time."""
    lacking: int = 0
    """Chunks that this relay has lost."""


def newest(found: Iterable[Stored]) -> list[Stored]:
    """Return the newest checkpoint of a Manager, once for each relay that has it. Empty: none is there.

    A checkpoint of ``keepstep.checkpoint.save`` has no quorum_id, and a state of its own structure. Within one history
    of a job, quorum_ids and steps grow. A job that went back to an earlier step has a new quorum_id, so its later
    checkpoints are newer than those that it gave up.
    """
    found = [one for one in found if one.quorum_id]
    best = max(found, key=lambda one: (one.quorum_id, one.step, one.committed), default=None)
    return [one for one in found if best is not None and one.id == best.id]


Damage = Mapping[tuple[str, str], str]
"""Why a copy of a checkpoint could not be loaded, by address of the relay and id."""


def newest_whole(found: Iterable[Stored], damage: Damage) -> tuple[list[Stored], dict[str, str]]:
    """Return the newest checkpoint that may be whole, as ``newest`` does, and the newer ones that are damaged.

    Several relays that have lost chunks may have all of them together, so only a load tells.

    Args:
        found: at all relays.
        damage: of copies that could not be loaded.

    Returns:
        The copies of the checkpoint, whole ones first. Then the sentence about each damaged one, by its id.
    """
    rest, skipped = list(found), dict[str, str]()
    while best := newest(rest):
        rest = [one for one in rest if one.id != best[0].id]
        copies = sorted((one for one in best if (one.relay, one.id) not in damage), key=lambda one: one.lacking > 0)
        if copies and (len(copies) > 1 or not copies[0].lacking):
            return copies, skipped
        reasons = dict.fromkeys(
            damage.get((one.relay, one.id), f"{one.lacking} chunks are missing at {one.relay}") for one in best
        )
        skipped[best[0].id] = f"step {best[0].step} ({best[0].id}): {'; '.join(reasons)}"
    return [], skipped
