"""What a rank sees of its group, whichever rank it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from keepstep.group.merging import DisagreeError
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.rendezvous.key_value_server import KeyValueServer
from keepstep_mesh.errors import KeepstepError, LayoutMismatch, SessionClosed
from keepstep_mesh.protocol.group_messages import RankAsk, RankDenied, RankVote
from keepstep_mesh.protocol.messages import Healing, ServiceAddress

RANK_BEAT = 1.0
"""Seconds between heartbeats within a group."""
CLOSE_SECONDS = 1.0
"""How long a connection that is closed waits for the other side to say so too."""
RANK_SILENCE = 5.0
"""Seconds of silence after which a rank counts as dead, unless the job's ``heartbeat_timeout`` is longer."""


async def rank_beats() -> AsyncIterator[bool]:
    """One each ``RANK_BEAT``: whether this process slept meanwhile, and heard nobody for a reason of its own."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + RANK_BEAT
        await asyncio.sleep(RANK_BEAT)
        yield loop.time() - due > RANK_SILENCE / 4


class RankLink(Protocol):
    """How a rank takes part in its group. Rank 0's is the server itself, every other rank's a ``RankClient``."""

    replica_id: str
    address: str
    """Of the group server, as its peers know it."""
    layout_lines: list[str]
    key_values: KeyValueServer | None
    """The rendezvous table, when this process serves it."""

    @property
    def services(self) -> tuple[ServiceAddress, ...]:
        """Relays and metrics services, as the lighthouse told of them last."""

    async def ask(self, ask: RankAsk) -> QuorumPlan:
        """Return the plan of the group's next step, once all ranks have asked.

        Raises:
            TimeoutError: no quorum formed in time.
            Leaving: the group has left the job.
            LayoutMismatch: parameters or settings differ from the job's.
            SessionClosed: the group or its session has ended.
            KeepstepError: anything else.
        """

    async def vote(self, vote: RankVote, timeout: float) -> bool:
        """The group's decision. TimeoutError when not every rank voted in time."""

    def finished_step(self) -> None:
        """The step of the last answer was committed or has failed. From any thread."""

    def healing(self, progress: Healing) -> None:
        """How far this rank's heal is; the lighthouse is told of all ranks together."""

    def wish_to_leave(self, reason: str) -> None:
        """The group will leave at its next step; a request that nobody answers is given up for it."""

    async def leave(self, reason: str, timeout: float) -> None: ...

    async def fail(self, reason: str) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GroupSettings:
    world_size: int
    host: str
    """Address to advertise; the server binds to it."""
    port: int = 0
    restart: int = 0
    store_address: str = ""
    """What members are told to meet at; empty: this server."""
    quorum_retries: int = 0
    rank_0_connects: bool = False
    """True: rank 0 is a client like the others (``coordination.ManagerServer``)."""


class Leaving(KeepstepError):
    """The group has left the job on purpose; the training thread turns this into ``Drained``."""


_DENIALS: dict[str, type[Exception]] = {
    "deadline": TimeoutError,
    "leaving": Leaving,
    "disagree": DisagreeError,
    "layout": LayoutMismatch,
    "closed": SessionClosed,
}
"""What the code of a denied request means; any other is a KeepstepError."""


def denied(request: int, error: Exception) -> RankDenied:
    """How a rank is told what came of its request."""
    code = next((code for code, kind in _DENIALS.items() if isinstance(error, kind)), "failed")
    told = isinstance(error, (TimeoutError, KeepstepError))
    reason = str(error) if told else f"{type(error).__name__}: {error}"
    return RankDenied(request, code, reason, error.peer_address if isinstance(error, LayoutMismatch) else "")


def denial(code: str, reason: str, peer_address: str = "") -> Exception:
    """What a denied request raises."""
    kind = _DENIALS.get(code, KeepstepError)
    return LayoutMismatch(reason, peer_address) if kind is LayoutMismatch else kind(reason)
