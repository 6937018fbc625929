"""Rules for groups whose training thread hangs, is slow, or is stopped.

* A group is ended for a hang only if its thread hangs, and has done so for as long as its equal stacks must.
* Once the faults stop, each group that hangs is ended within the limit of the first steps, or spared. An operator ends
  those that are spared. Launchers start them again, and so all groups recover.
* No group is spared while most groups do not hang, and one of them has its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from keepstep_lighthouse.quorum.hangs.verdict import NEEDED_SPREAD
from keepstep_mesh.protocol.lineage import is_live

if TYPE_CHECKING:
    from tests.simulation.actors.worker import Worker

HANG_AFTER = 2.0
"""``hang_after`` of the policy. The steps of a group that is not slow take half a second at most."""
ANSWER_SECONDS = 0.1
"""A look at a thread may be as old as this when it counts, by the clock of the lighthouse."""


class HangChecks:
    def __init__(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        self.ended = 0
        """Groups that were ended because they hung."""

    def on_ended(self, worker: Worker) -> None:
        """The lighthouse ends this group."""
        self.ended += 1
        if not worker.thread.hangs:
            doing = worker.thread.trouble or "nothing unusual"
            self._violated(f"{worker.replica_id} is ended for a hang, and its thread does {doing}")
        elif (lasted := worker.sim.time.now - worker.thread.since) < NEEDED_SPREAD * HANG_AFTER - ANSWER_SECONDS:
            self._violated(f"{worker.replica_id} is ended for a hang of {lasted:g} s")

    def on_spared(self, worker: Worker, others: Iterable[Worker]) -> None:
        """The lighthouse finds that this group hangs, and does not end it."""
        alive = [one for one in others if one.alive]
        well = [one for one in alive if not one.thread.hangs]
        able = [one for one in well if one.step >= worker.step and is_live(one.step, one.lineage)]
        if 2 * len(well) > len(alive) and able:
            self._violated(f"{worker.replica_id} hangs and is spared, and {able[0].replica_id} could go on")
