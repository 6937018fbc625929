"""The words of ``keepstep chaos``: targets, kinds of faults, and faults. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    GROUP = "group"
    LIGHTHOUSE = "lighthouse"
    RELAY = "relay"
    METRICS = "metrics"
    STORE = "store"
    """An etcd node of the lighthouses."""
    JOB = "job"
    """The job itself, for orders that concern all of its groups."""


@dataclass(frozen=True, slots=True, order=True)
class Target:
    role: Role
    name: str

    def __str__(self) -> str:
        return self.name if self.role in (Role.GROUP, Role.JOB) else f"{self.role} {self.name}"


GROUPS = frozenset({Role.GROUP})
JOB = frozenset({Role.JOB})
PROCESSES = frozenset(Role) - JOB
SERVED = PROCESSES - {Role.STORE}
"""Processes of keepstep."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Args:
        name: The word for it, as on the command line.
        what: A phrase for tables and help.
        roles: Targets that it can hit.
        weight: How often it is drawn, relative to the other kinds.
        lasts: Whether it has a duration; otherwise it is done at once.
        takes_away: Whether the target does no work until it has recovered.
        inside: Whether the process brings it on itself, on an order.
        asked_for: Whether it is drawn only if it is asked for by name: it may spoil the training for good.
    """

    name: str
    what: str
    roles: frozenset[Role]
    weight: int
    lasts: bool = False
    takes_away: bool = True
    inside: bool = False
    asked_for: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", "SIGKILL", PROCESSES, 3),
        Kind("freeze", "SIGSTOP, and SIGCONT later", PROCESSES, 5, lasts=True),
        Kind("slow", "SIGSTOP and SIGCONT in quick alternation", PROCESSES, 4, lasts=True),
        Kind("restart", "SIGTERM, and a start", PROCESSES, 2),
        Kind("memory", "no more memory than it has", PROCESSES, 1, lasts=True),
        Kind("cut", "packets lost in both directions", PROCESSES, 3, lasts=True),
        Kind("cut-in", "packets to it lost", PROCESSES, 2, lasts=True),
        Kind("cut-out", "packets from it lost", PROCESSES, 2, lasts=True),
        Kind("loss", "a fifth of the packets from it lost", PROCESSES, 2, lasts=True),
        Kind("delay", "packets from it 100 ms late, give or take 20 ms", PROCESSES, 2, lasts=True),
        Kind("throttle", "packets from it at 1 Mbit/s", PROCESSES, 2, lasts=True),
        Kind("fill-disk", "no space in its data directory", PROCESSES, 2, lasts=True, takes_away=False),
        Kind("exception", "an exception in its next step", GROUPS, 2, inside=True),
        Kind("hang", "its training loop in a wait", GROUPS, 1, lasts=True, inside=True),
        Kind("hang-loop", "its training loop in other code", GROUPS, 1, lasts=True, inside=True),
        Kind("nan", "a NaN in its next contribution", GROUPS, 1, takes_away=False, inside=True, asked_for=True),
        Kind("gil", "the interpreter locked", SERVED, 2, lasts=True, inside=True),
        Kind("clock", "its clock an hour ahead, and back", SERVED, 1, lasts=True, takes_away=False, inside=True),
        Kind("evict", "`keepstep evict`", GROUPS, 1),
        Kind("drain", "`keepstep drain`, and a start", GROUPS, 1),
        Kind("policy", "a change of the policy, and back", JOB, 2, lasts=True, takes_away=False),
        Kind("verify", "`keepstep verify-replicas`", JOB, 2, takes_away=False),
    )
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was drawn. ``seconds``: how long it lasts; 0: it is done at once."""

    number: int
    kind: Kind
    target: Target
    seconds: float

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.2f} s" if self.kind.lasts else ""
        return f"{self.kind.name} {self.target}{lasting}"
