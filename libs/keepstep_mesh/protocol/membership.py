"""What messages say about groups and quorums: parts of messages, sent as the list of their fields."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_DATA_BYTES = 64 * 1024
"""Limit of ``MemberInfo.data``, packed."""

Lineage = int | str
"""Which weights a group holds: the quorum_id of its last commit; before the first one its incarnation, or ``""``."""

Data = object
"""Any msgpack value. Checked for size, never for shape."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """What changes rarely about a group; sent with a request only when it changed within the session."""

    address: str = ""
    """Base URL of the group server, ``http://host:port``."""
    store_address: str = ""
    """Where members meet to build their process groups; ``http://host:port`` for ours, ``host:port`` for a TCPStore."""
    world_size: int = 1
    """Ranks of the group."""
    layout: str = ""
    """Digest of parameter names, shapes, dtypes and bucket layout; empty while unknown."""
    data: Data = None
    handles: tuple[str, ...] = ()
    """Per-rank reconfigure handles of the process group, if it has them."""
    rendezvous: int = 1
    """Version of what its ranks understand of what members store where they meet."""


@dataclass(frozen=True, slots=True)
class Member:
    """One group of a quorum, as announced."""

    replica_id: str
    step: int
    lineage: Lineage
    commit_failures: int
    shrink_only: bool
    info: MemberInfo
    batches_committed: int = 0
    """0 also from a lighthouse that does not know it."""


@dataclass(frozen=True, slots=True)
class StateRoot:
    """Root digest of the live state that a group held at (``step``, ``lineage``): equal for equal states."""

    step: int
    lineage: Lineage
    digest: str
    """Hexadecimal. Of a group of several ranks: over those of its ranks."""


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """The answer that a group works under: it got it and has neither committed nor failed that step yet."""

    epoch: int
    quorum_id: int
    step: int
    """``max_step`` of that answer."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """A quorum as a client sees it: an answer with its member list put back.

    In steady state all members stand at one (step, lineage) and ``listed`` is the very tuple that came when the list
    last changed; so a round costs a client O(1), however many members there are.
    """

    epoch: int
    quorum_id: int
    created_ms: int
    joiners: int
    step: int
    lineage: Lineage
    """The reference state's; with ``uniform`` everybody's."""
    uniform: bool
    """True: what ``listed`` says of steps, lineages, batches and failures is old; all stand at (step, lineage)."""
    listed: tuple[Member, ...]
    """The members, sorted by replica_id, as last sent."""
    verify: bool = False
    """As in the answer."""
    allow_heal: bool = True
    """As in the answer."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The members with their facts of this round. O(members)."""
        if not self.uniform:
            return self.listed
        return tuple(
            replace(member, step=self.step, lineage=self.lineage, commit_failures=0, shrink_only=False)
            for member in self.listed
        )
