"""Evidence about a failed step: an error of this group, or the groups that it cannot reach.

The lighthouse keeps a group out that fails by itself, or that others cannot reach. Gloo and NCCL do not tell whose
connection failed first: a group that aborts a step closes the connections of all its peers. So a group whose step
failed, with the loss of no group, *probes* the group servers of its quorum: it connects to the ``MAX_PEERS`` next to
it, at the same time, and to the next ones after each failed step whose probe found nothing. A group that gives no
answer counts. A refusal shows that the process died, which the lighthouse learns soon; but a group that refuses again,
in the next quorum that fails, is behind a firewall, and counts too.

A link may work again when the step fails, so a step that makes no progress is probed too. A connection over TCP sends
again after 0.2 s, and after twice the time before each further try: a link whose outage made a collective time out was
down for at least the first two fifths of that time. A group that gives no answer to two probes in a row in one stall is
cut off. Where a model exists once, the step ends then, because its recovery costs less than the rest of the timeout.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol
from urllib.parse import urlsplit

from keepstep.group.quorum_plan import QuorumPlan
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.membership import MAX_FAILURE_REASON, MAX_PEERS, PEER, UNKNOWN, Member, StepFailure
from keepstep_mesh.text import listed

REACH_SECONDS = 1.0
"""Limit of a probe."""
LOST_POLL_SECONDS = 0.02
"""Interval at which a probe checks whether a group of its quorum was lost, which makes its result needless."""
STALLED_PART = 0.4
"""Part of the timeout of collectives after which a step without progress is probed."""
MAX_NAMED = 4
LOOKS = 10
"""Number of looks at a step within the timeout of collectives."""

log = get_logger("keepstep.step")


class Progress(Protocol):
    """Sign that a step makes progress."""

    launched: float | None
    """Monotonic seconds at which the last collective began; None: none did."""


@dataclass(slots=True)
class _Step:
    """The step in progress."""

    plan: QuorumPlan
    progress: Progress
    answered: float
    probed: float = 0.0
    """Beginning of the stall that was probed last, monotonic seconds."""
    silent: set[str] = field(default_factory=set)
    """replica_ids of the groups that gave no answer during a stall."""
    doubted: set[str] = field(default_factory=set)
    """Those that gave no answer to the last probe, which the next one decides."""

    @property
    def progressed(self) -> float:
        """Monotonic seconds of the quorum, or of the last collective that began."""
        return max(self.answered, self.progress.launched or 0.0)


class FailureEvidence:
    """Evidence of this rank.

    Args:
        timeout: of a collective, in seconds.
        cut_off: called with a quorum_id and a reason, on the event-loop thread, when groups of that quorum are cut off
            during a step; None: the step ends by itself.
    """

    def __init__(self, timeout: float, cut_off: Callable[[int, str], None] | None = None) -> None:
        self._timeout = timeout
        self._cut_off = cut_off
        self._step: _Step | None = None
        self._failed: StepFailure | None = None
        self._lost_of = -1
        """The last quorum that lost a member."""
        self._refused: dict[str, int] = {}
        """By replica_id: the quorum in which a group refused the last probe."""
        self._members: tuple[str, ...] = ()
        """Groups of the last quorum that was probed."""
        self._unexplained = 0
        """Failed steps of these groups whose probe found nothing. Equal in all of them, so that those of a pair probe
        each other: a group that joins begins with 0, and so do the others then."""

    # ---- the step, on the training thread or the event-loop thread

    def begins(self, plan: QuorumPlan, progress: Progress) -> None:
        """A quorum has formed."""
        self._step = _Step(plan, progress, time.monotonic())

    def failed(self, cause: str, error: Exception) -> None:
        """The step will not commit. ``cause``: ``OWN`` or ``UNKNOWN``."""
        step = self._step
        if step is not None and len(step.plan.members) > 1:
            reason = f"{type(error).__name__}: {error}"[:MAX_FAILURE_REASON]
            self._failed = StepFailure(step.plan.quorum_id, cause, reason=reason)

    def ended(self) -> None:
        """The step has been committed or discarded."""
        if self._failed is None:
            self._step = None

    def member_lost(self, quorum_id: int) -> None:
        """A group of the quorum is lost, which explains that its step failed."""
        self._lost_of = quorum_id

    # ---- on the event-loop thread

    async def collect(self) -> StepFailure | None:
        """Return the evidence about the step that failed last, once; None: none. Takes up to ``REACH_SECONDS``."""
        failed, step, self._failed = self._failed, self._step, None
        self._step = None
        if failed is None or step is None or failed.quorum_id == self._lost_of:
            return None
        if failed.cause != UNKNOWN:
            return failed
        silent = step.silent or await self._probe(step.plan)
        if failed.quorum_id == self._lost_of:
            return None
        if not silent and not self._refused:
            self._unexplained += 1
        return replace(failed, cause=PEER, peers=tuple(sorted(silent)[:MAX_PEERS])) if silent else failed

    async def watch(self) -> None:
        """Probe steps that make no progress. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._timeout / LOOKS)
            step = self._step
            if step is None or self._failed is not None or (step.probed >= step.progressed and not step.doubted):
                continue
            if time.monotonic() - step.progressed > STALLED_PART * self._timeout:
                step.probed = step.progressed
                silent = await self._probe(step.plan)
                step.silent |= silent
                if self._cut_off is not None:
                    cut, step.doubted = step.doubted & silent, silent
                    if cut and step is self._step:
                        self._cut_off(step.plan.quorum_id, f"this member cannot reach {listed(sorted(cut), MAX_NAMED)}")

    async def _probe(self, plan: QuorumPlan) -> set[str]:
        """Return the replica_ids of the groups that give no answer; empty once a group of the quorum is known lost."""
        if plan.replica_ids != self._members:
            self._members, self._unexplained = plan.replica_ids, 0
        peers = _nearest(plan.members, plan.replica_rank, self._unexplained)
        probes = {asyncio.create_task(_reach(peer.info.address)): peer.replica_id for peer in peers}
        try:
            pending = set(probes)
            while pending and plan.quorum_id != self._lost_of:
                _, pending = await asyncio.wait(pending, timeout=LOST_POLL_SECONDS)
        finally:
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
        if plan.quorum_id == self._lost_of:
            return set()
        refused = {replica_id for probe, replica_id in probes.items() if probe.result() == "refuses"}
        again = {one for one in refused if self._refused.get(one, plan.quorum_id) != plan.quorum_id}
        self._refused = {one: self._refused.get(one, plan.quorum_id) for one in refused}
        silent = {replica_id for probe, replica_id in probes.items() if probe.result() == "silent"} | again
        if silent:
            log.warning("groups of the quorum cannot be reached", quorum_id=plan.quorum_id, groups=sorted(silent))
        return silent


def _nearest(members: Sequence[Member], rank: int, skipped: int = 0) -> list[Member]:
    """Return the ``MAX_PEERS`` members next to ``rank`` on both sides, without that one.

    ``skipped``: number of such batches that are left out, the nearest first. After the last batch comes the first.
    """
    distances = sorted(range(1, len(members)), key=lambda offset: min(offset, len(members) - offset))
    begin = MAX_PEERS * (skipped % max(1, math.ceil(len(distances) / MAX_PEERS)))
    return [members[(rank + offset) % len(members)] for offset in distances[begin : begin + MAX_PEERS]]


async def _reach(address: str) -> Literal["answers", "refuses", "silent"]:
    """Connect to a group server, and return how it reacts."""
    url = urlsplit(address)
    if not url.hostname or not url.port:
        return "answers"  # a client without a server: nothing to conclude
    try:
        async with asyncio.timeout(REACH_SECONDS):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
    except ConnectionRefusedError:
        return "refuses"
    except OSError:  # TimeoutError is one
        return "silent"
    writer.transport.abort()
    return "answers"
