"""Rules for spares and for the groups that they replace.

* A quorum has no more groups than the job should have, plus those that wait for their replacement. Groups that were
  lost or missed a quorum, and came back with the same process, are additional ones.
* A group that is replaced is drained when the job has all its groups without it, and each of them has committed and
  holds the state of the job, also in the step that it takes; one group less if ``max_replicas`` has no room for
  another, but never the last one.
* When the faults are over, the job has all its groups, and no group waits for its replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from keepstep.session.session_machine import About
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.quorum.events import Announce, LogEntry, Persist
from keepstep_mesh.protocol.lineage import Soundness, soundness

if TYPE_CHECKING:
    from tests.simulation.actors.worker import Worker

MOST_SPARES = 3


class SpareChecks:
    """The number of spares, and the checks.

    Args:
        seed: Of the simulation.
        groups: Number of groups that train when none is missing.
        workers: All incarnations.
        violated: Called with a sentence when a rule is broken.
    """

    def __init__(self, seed: int, groups: int, workers: Mapping[str, Worker], violated: Callable[[str], None]) -> None:
        self.count = Random(f"spares {seed}").randint(1, MOST_SPARES)
        self.about = About(groups=groups, standby=True)
        """Facts that every group tells the lighthouse."""
        self._workers, self._violated = workers, violated
        self._most = groups
        """With the largest min_replicas so far."""
        self._trained: set[str] = set()
        """Groups that were in a quorum."""
        self._missed: set[str] = set()
        """Of these the ones that were lost, or not in a later quorum."""
        self._replaced: set[str] = set()
        """Groups that were drained because a spare has their place."""
        self._members_unknown: set[Job] = set()
        self._announced: dict[Job, tuple[int, int]] = {}
        """Quorum and step of each job's last announcement; a group that reconnects gets the same once more."""

    def on_decisions(self, job: Job, decisions: list[Any]) -> None:
        """Check what the core decided."""
        for decision in decisions:
            match decision:
                case LogEntry("lost", replica_id):
                    self._missed.add(replica_id)
                case LogEntry("joined", replica_id):
                    self._replaced.discard(replica_id)
                case Persist(record):
                    self._most = max(self._most, record.policy.min_replicas)
                case LogEntry("quorum_id_raised"):
                    self._members_unknown.add(job)
                case LogEntry("drain", replica_id, detail) if str(detail["reason"]).startswith("replaced"):
                    self._on_replaced(job, replica_id)
                case Announce(quorum_id=quorum_id, step=step) if self._announced.get(job) != (quorum_id, step):
                    self._announced[job] = quorum_id, step
                    self._on_announce(job, [member.replica_id for member in decision.listed])

    def _on_replaced(self, job: Job, replica_id: str) -> None:
        self._replaced.add(replica_id)
        others = [self._workers[one] for one in job.core.record.members if one not in self._replaced]
        good = [one.replica_id for one in others if one.commits and _holds_a_state(one)]
        if len(good) < max(1, self.about.groups - (job.core.record.policy.max_replicas == self.about.groups)):
            self._violated(f"{replica_id} is replaced, and only {good} of {self.about.groups} groups train without it")

    def _on_announce(self, job: Job, members: list[str]) -> None:
        record, probation = job.core.record, job.core._features.probation.partings
        came_back = len(self._missed.intersection(members)) + len(probation.groups)
        self._missed |= self._trained.difference(members)
        self._trained.update(members)
        if job not in self._members_unknown and len(members) > self._most + len(record.replacing) + came_back:
            self._violated(f"{members} train in a job of {self._most} groups, {len(record.replacing)} to be replaced")


def _holds_a_state(worker: Worker) -> bool:
    """Return whether the group has weights that the job may go on from."""
    without = worker.plan is not None and worker.plan.behind
    return soundness(worker.step, worker.lineage) >= Soundness.BEHIND and not without
