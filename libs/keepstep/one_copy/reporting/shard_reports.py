"""Report the shard of this rank, its keepers, and the copies that it keeps, to the lighthouse."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from keepstep.one_copy.core.recovery_plan import Kind, Recovery
from keepstep.one_copy.core.world import keepers
from keepstep_mesh.protocol.messages import Exposure, ShardReport

REPEAT_SECONDS = 5.0
"""A report is repeated after this time: a lighthouse that took over has none, and sizes of copies change."""
ALONE = (Exposure("", "the job has no other member that could keep copies"),)
ON_THE_WAY = "they are on their way"
LOST = "lost"


class ShardReports:
    """Reports after each recovery, when exposure changes, and every ``REPEAT_SECONDS``.

    Args:
        replica_id, group_rank: of this rank.
        send: sends a report. Called on the training thread.
        exposed: returns the keepers of this rank that refuse copies, and the reason.
        copies_bytes: returns the size of the copies that this rank keeps.
        copies: number of keepers of each rank.
    """

    def __init__(
        self,
        replica_id: str,
        group_rank: int,
        send: Callable[[ShardReport], None],
        *,
        exposed: Callable[[], Mapping[str, str]],
        copies_bytes: Callable[[], int],
        copies: int,
    ) -> None:
        self._replica_id, self._group_rank = replica_id, group_rank
        self._send = send
        self._exposed, self._copies_bytes = exposed, copies_bytes
        self._copies = copies
        self._keeps: tuple[str, ...] = ()
        """Members of which this one keeps copies, or should."""
        self._last: ShardReport | None = None
        self._sent = 0.0

    def recovered(self, recovery: Recovery, step: int, seconds: float, *, went_back: int = 0) -> None:
        """Report a recovery.

        Args:
            recovery: its plan.
            step: committed steps of its state.
            seconds: its duration.
            went_back: committed steps that it has lost.
        """
        world, previous = recovery.world, recovery.previous
        seat = world.seat_of(self._replica_id)
        if seat is None:  # this member leaves
            return
        names = [world.seats[one].replica_id for one in keepers(world, seat, self._copies)]
        rank = world.rank(seat, self._group_rank)
        kept = [one for one in range(len(world.seats)) if seat in keepers(world, one, self._copies)]
        self._keeps = tuple(world.seats[one].replica_id for one in kept)
        fills = [keeper // world.ranks_per_seat for one, keeper in recovery.fills if one == rank]
        if recovery.kind is not Kind.REPLACED:
            fills = []  # nothing can be lost yet, or the recovery has waited for the copies
        filled = {world.seats[one].replica_id for one in fills}
        waiting = tuple(Exposure(one, ON_THE_WAY) for one in names if one in filled)
        self._tell(
            ShardReport(
                world=world.formed,
                seat=seat,
                ranks=world.size,
                former_ranks=previous.size if previous is not None else 0,
                how=recovery.kind.value,
                step=step,
                seconds=seconds,
                copies_bytes=self._copies_bytes(),
                keepers=tuple(names),
                exposed=self._refused() or waiting or (() if names else ALONE),
                went_back=went_back,
                formed=True,
                keeps=() if recovery.kind is Kind.REPLACED else self._keeps,
            )
        )

    @property
    def covered(self) -> bool:
        """Whether this rank may leave: its keepers have its copies, or no other member is there."""
        return not self._exposed()

    def committed(self, *, covered: bool) -> None:
        """Report what has changed since the last report, if anything has.

        Args:
            covered: all ranks had copies of their shards.
        """
        last = self._last
        if last is None:
            return
        exposed = self._refused() or (() if last.keepers else ALONE)
        keeps = self._keeps if covered else ()
        if (exposed, keeps) != (last.exposed, last.keeps) or time.monotonic() - self._sent >= REPEAT_SECONDS:
            self._tell(replace(last, exposed=exposed, copies_bytes=self._copies_bytes(), formed=False, keeps=keeps))

    def lost(self, quorum_id: int, step: int) -> None:
        """Report that shards are lost, and this member ends.

        Args:
            quorum_id: in which that was found.
            step: highest step that was committed.
        """
        self._tell(ShardReport(quorum_id, 0, 0, 0, LOST, step, 0.0, 0, went_back=step, formed=True))

    def _refused(self) -> tuple[Exposure, ...]:
        return tuple(Exposure(keeper, reason) for keeper, reason in sorted(self._exposed().items()))

    def _tell(self, report: ShardReport) -> None:
        self._last, self._sent = report, time.monotonic()
        self._send(report)
