"""Rules for the lighthouses, over all of them together.

* A quorum_id has one membership. In the store quorum_id and epoch only grow; for no group do they fall.
* A quorum is announced after it was written, within the lease, and by a leader in the epoch of the store. A deposed
  leader may confirm the last quorum that it wrote until its lease ends, but not when a quorum of other groups was
  announced in the meantime and all members are still in session with it.
* A quorum has at least min_replicas members, unless it is a finishing one, in which no group takes a step. None of
  them is evicted, and all requests in it are open: their sessions are not over, and they were not cancelled.
* An eviction, and the end of the job, is written before any group hears of it. No quorum of a closed job is announced.
* The core of a job is consistent, and asks for no timer that is due at once, again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from keepstep_lighthouse.jobs import records
from keepstep_lighthouse.jobs.job import MIN_WAIT, Job
from keepstep_lighthouse.jobs.records import JOB_PREFIX
from keepstep_lighthouse.leadership.term import EPOCH_KEY
from keepstep_lighthouse.quorum.events import Announce, Cancelled, Closed, Event, Tell, Tick
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.store.contract import Write
from keepstep_mesh.protocol import messages
from keepstep_mesh.protocol.messages import Evicted

if TYPE_CHECKING:
    from tests.simulation.actors.node import Node
    from tests.simulation.simulation import Simulation

JOB_KEY = JOB_PREFIX + "job"
VALIDATED_EVERY = 64
"""Events between two validations of a core, unless the simulation is careful."""
MAX_TICKS = 10
"""Ticks in a row without time or another event between them."""


class Announced(NamedTuple):
    quorum_id: int = 0
    members: tuple[str, ...] = ()


class QuorumChecks:
    """``careful``: validate the core after every event."""

    def __init__(self, sim: Simulation, violated: Callable[[str], None], *, careful: bool) -> None:
        self.memberships: dict[int, tuple[str, ...]] = {}
        """Of announced quorums, by quorum_id."""
        self.rounds = 0
        self.highest = Announced()
        """The announced quorum of the highest quorum_id."""
        self.announced_by = ""
        """Name of the lighthouse that announced last."""
        self._sim, self._violated = sim, violated
        self._validated_every = 1 if careful else VALIDATED_EVERY
        self._events = 0
        self._written_quorums: dict[int, tuple[str, ...]] = {}
        self._written_evictions: set[str] = set()
        self._stored = JobRecord()
        self._last_quorum_of: dict[int, int] = {}
        """By epoch: the quorum_id in the store when the epoch ended."""
        self._last_round = (0, 0, 0, 0)
        """Epoch, quorum_id, version and step of the last announcement."""
        self._closed: set[tuple[Job, int]] = set()
        self._cancelled: set[tuple[Job, int, int]] = set()
        self._ticks: dict[Job, tuple[float, int]] = {}

    @property
    def stored(self) -> JobRecord:
        """The record of the job in the store."""
        return self._stored

    # ---- the store

    def on_write(self, writes: Sequence[Write]) -> None:
        """Check writes just before the store carries them out."""
        for write in writes:
            if write.key == EPOCH_KEY:
                before, after = self._sim.epoch, int(write.value or b"0")
                if after <= before:
                    self._violated(f"the epoch falls from {before} to {after}")
                self._last_quorum_of[before] = self._stored.quorum_id
            elif write.key == JOB_KEY:
                self._on_record(records.decode(JOB_KEY, write.value or b""))
        if self._sim.tracing:
            self._sim.note(f"   store  {[(one.key, one.value) for one in writes]}")

    def _on_record(self, record: JobRecord) -> None:
        if record.quorum_id < self._stored.quorum_id:
            self._violated(f"in the store quorum_id falls from {self._stored.quorum_id} to {record.quorum_id}")
        known = self._written_quorums.setdefault(record.quorum_id, record.members)
        if known != record.members:
            self._violated(f"quorum {record.quorum_id} is written as {known} and as {record.members}")
        self._written_evictions.update(record.evicted)
        self._stored = record

    # ---- the core of a job

    def before_event(self, job: Job, event: Event) -> None:
        if isinstance(event, Tick):
            now = job._loop.time()
            at, count = self._ticks.get(job, (0.0, 0))
            count = count + 1 if now - at < 2 * MIN_WAIT else 0
            self._ticks[job] = now, count
            if count > MAX_TICKS:
                self._violated("the core asks for one tick after another and time stands still")
            return
        self._ticks.pop(job, None)
        if isinstance(event, Closed):
            self._closed.add((job, event.session))
        elif isinstance(event, Cancelled):
            self._cancelled.add((job, event.session, event.request))

    def after_event(self, job: Job) -> None:
        self._events += 1
        if self._events % self._validated_every == 0:
            try:
                job.core.validate()
            except AssertionError as error:
                self._violated(f"the core of {self._sim.node_of(job).name} is inconsistent: {error}")

    def on_decisions(self, job: Job, decisions: Sequence[Any]) -> None:
        """Check what the core decided, before any of it is carried out."""
        for decision in decisions:
            if not isinstance(decision, Announce):
                continue
            if self._sim.shards is not None:
                self._sim.shards.decided(job.term.epoch, decision.quorum_id, job.core._groups)
            for number, request in decision.to:
                if number not in job.sessions or (job, number) in self._closed:
                    self._violated(f"session {number} is over, and in quorum {decision.quorum_id}")
                if (job, number, request) in self._cancelled:
                    self._violated(f"request {request} of session {number} was cancelled; it is in a quorum")

    # ---- what a lighthouse says

    def on_announce(self, job: Job, announce: Announce) -> None:
        members, quorum_id = tuple(member.replica_id for member in announce.listed), announce.quorum_id
        round_ = job.term.epoch, quorum_id, announce.version, announce.step
        if len(announce.to) != len(members) or round_ == self._last_round:
            return  # a repeated answer
        self._last_round = round_
        if self._sim.shards is not None:
            self._sim.shards.announced(job.term.epoch, quorum_id)
        node = self._sim.node_of(job)
        self.rounds += 1
        self.announced_by = node.name
        if self._sim.tracing:
            self._sim.note(f"{node.name} announces quorum {quorum_id} of {members}, step {announce.step}")
        if self.memberships.setdefault(quorum_id, members) != members:
            self._violated(f"quorum {quorum_id} is {self.memberships[quorum_id]} and {members}")
        if self._written_quorums.get(quorum_id) != members:
            self._violated(f"quorum {quorum_id} of {members} is announced and was not written")
        if node.lease_ended(self._sim.time.now):
            self._violated(f"{node.name} announces quorum {quorum_id} after the end of its lease")
        if node.leads_in_store:
            self._announced_by_leader(node, job, Announced(quorum_id, members), finishing=announce.finishing)
        else:
            self._announced_by_deposed(node, job, Announced(quorum_id, members))
        if quorum_id >= self.highest.quorum_id:
            self.highest = Announced(quorum_id, members)
        self._sim.stop_if_recovered()

    def _announced_by_leader(self, node: Node, job: Job, quorum: Announced, *, finishing: bool) -> None:
        record = self._stored
        if (record.quorum_id, record.members) != quorum:
            self._violated(f"{node.name} announces {quorum}, {record} is written")
        if job.term.epoch != self._sim.epoch:
            self._violated(f"{node.name} announces {quorum} in epoch {job.term.epoch}, not in {self._sim.epoch}")
        if quorum.quorum_id < self.highest.quorum_id:
            self._violated(f"{node.name} leads and goes back from {self.highest} to {quorum}")
        if len(quorum.members) < (1 if finishing else max(1, record.policy.min_replicas)):
            self._violated(f"{quorum} is below min_replicas {record.policy.min_replicas}")
        if record.closed is not None:
            self._violated(f"{node.name} announces {quorum}, and the job is closed")
        if evicted := set(quorum.members) & set(record.evicted):
            self._violated(f"{quorum} holds the evicted {evicted}")

    def _announced_by_deposed(self, node: Node, job: Job, quorum: Announced) -> None:
        epoch = job.term.epoch
        last = self._last_quorum_of.get(epoch)
        if last is not None and quorum.quorum_id != last:
            self._violated(f"{node.name}, deposed, announces {quorum}; the last of epoch {epoch} was {last}")
        if self.highest.quorum_id > quorum.quorum_id and not set(quorum.members) & set(self.highest.members):
            workers = [self._sim.workers[replica_id] for replica_id in quorum.members]
            if all(worker.alive and node.serves(worker.session.connection) for worker in workers):
                self._violated(f"{node.name}, deposed, answers {quorum} after {self.highest} was announced")

    def on_tell(self, job: Job, tell: Tell) -> None:
        if isinstance(tell.message, Evicted):
            for number in tell.to:
                if (session := job.sessions.get(number)) and session.replica_id not in self._written_evictions:
                    self._violated(f"{session.replica_id} hears of an eviction that is not written")
        if isinstance(tell.message, messages.Closed) and tell.message.state != self._stored.closed:
            self._violated(f"a group hears that the job is closed at {tell.message.state}, which is not written")
