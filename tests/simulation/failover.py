"""One job whose lighthouses stand by for each other, in virtual time: the real shell, election and store contract.

Beside what must hold of every ``Training``, over all lighthouses together:

* One membership per quorum_id. In the store quorum_id and epoch never go back; for no group do they.
* What is announced was written before. Who was deposed may confirm the last quorum that it wrote, until its lease is
  over; never when a quorum of others was announced meanwhile and all its members are still in session with it.
* No quorum below min_replicas; nobody in it that was evicted; nobody hears of an eviction that is not written.
* No process has a fault of its own, or waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from keepstep_lighthouse.jobs import records
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.records import JOB_PREFIX
from keepstep_lighthouse.leadership.campaign import LEADER_KEY
from keepstep_lighthouse.leadership.term import EPOCH_KEY
from keepstep_lighthouse.quorum.events import Announce, JobRecord, Tell
from keepstep_lighthouse.store.contract import Write
from keepstep_mesh.protocol.messages import Evicted
from tests.simulation.failover_faults import FAULTS, faults_of
from tests.simulation.faults import Fault, inject
from tests.simulation.mesh import Mesh
from tests.simulation.node import Node
from tests.simulation.worker import Worker

JOB_KEY = JOB_PREFIX + "job"
Script = Generator[float | Callable[[], bool], None, None]
"""Faults by hand: yields seconds to wait, or what to wait for."""
LOOK_SECONDS = 0.005
SCRIPT_SECONDS = 60.0


class Failover(Mesh):
    """``faults``: those of the seed, if none are given. ``settings``: those of ``Mesh``."""

    def __init__(self, seed: int, faults: tuple[Fault, ...] | None = None, **settings: Any) -> None:
        super().__init__(seed, **settings)
        self._written_quorums: dict[int, tuple[str, ...]] = {}
        self._written_evictions: set[str] = set()
        self._last_quorum_of: dict[int, int] = {}
        """By epoch: the last quorum_id in the store while it was the epoch."""
        self._announced: tuple[int, tuple[str, ...]] = (0, ())
        """The highest quorum so far."""
        self._last_round = (0, 0, 0, 0)
        """Epoch, quorum_id, version and step of what was announced last."""
        self.announced_by = ""
        """Name of the lighthouse that announced last."""
        self._script_runs = False
        if "policy" not in settings:  # a trace has one of its own
            self.forbid_heals(seed)
        for fault in faults_of(seed) if faults is None else faults:
            self.time.at(fault.at, inject, self, fault, FAULTS)

    def play(self, script: Callable[[Failover], Script]) -> None:
        """As ``run``, with faults by hand, all of them."""
        self._script_runs = True
        self.time.at(0.0, self._follow, script(self), None, 0.0)
        self.run()

    def _follow(self, script: Script, condition: Callable[[], bool] | None, since: float) -> None:
        if condition is not None and not condition():
            if self.time.now - since > SCRIPT_SECONDS:
                self.violated(f"the script waits in vain in line {_line_of(script)}")
            self.time.after(LOOK_SECONDS, self._follow, script, condition, since)
            return
        for wanted in script:
            if callable(wanted):
                self.time.after(0.0, self._follow, script, wanted, self.time.now)
            else:
                self.time.after(wanted, self._follow, script, None, 0.0)
            return
        self._script_runs = False

    # ---- what must hold

    def written(self, writes: Sequence[Write]) -> None:
        """In the store, just before ``writes`` are carried out."""
        for write in writes:
            if write.key == EPOCH_KEY:
                before, after = int(self.store.values.get(EPOCH_KEY, b"0")), int(write.value or b"0")
                if after <= before:
                    self.violated(f"the epoch goes back from {before} to {after}")
                self._last_quorum_of[before] = self.stored.quorum_id
            elif write.key == JOB_KEY:
                self._record_written(records.decode(JOB_KEY, write.value or b""))
        if self.tracing:
            self.note(f"   store  {[(one.key, one.value) for one in writes]}")

    def _record_written(self, record: JobRecord) -> None:
        if record.quorum_id < self.stored.quorum_id:
            self.violated(f"in the store quorum_id goes back from {self.stored.quorum_id} to {record.quorum_id}")
        if self._written_quorums.setdefault(record.quorum_id, record.members) != record.members:
            self.violated(
                f"quorum {record.quorum_id} is {self._written_quorums[record.quorum_id]} and {record.members}"
            )
        self._written_evictions.update(record.evicted)

    @property
    def stored(self) -> JobRecord:
        value = self.store.values.get(JOB_KEY)
        return JobRecord() if value is None else records.decode(JOB_KEY, value)

    def announced(self, job: Job, announce: Announce) -> None:
        members, quorum_id = tuple(member.replica_id for member in announce.listed), announce.quorum_id
        round_ = job.term.epoch, quorum_id, announce.version, announce.step
        if len(announce.to) != len(members) or round_ == self._last_round:
            return  # an answer that is given again
        self._last_round = round_
        node = self.node_of(job)
        self.rounds += 1
        self.announced_by = node.name
        self.note(f"{node.name} announces quorum {quorum_id} of {members}, step {announce.step}")
        if self._memberships.setdefault(quorum_id, members) != members:
            self.violated(f"quorum {quorum_id} is {self._memberships[quorum_id]} and {members}")
        if self._written_quorums.get(quorum_id) != members:
            self.violated(f"quorum {quorum_id} of {members} is announced and was not written")
        leadership = node.lighthouse.leadership
        assert leadership is not None
        if self.time.now > self.store.lead_until.get(leadership._lease, 0.0):
            self.violated(f"{node.name} announces quorum {quorum_id} and its lease is over")
        if leadership.core.mine is not None and self.store.values.get(LEADER_KEY) == leadership.core.mine:
            self._announced_by_the_leader(node, members, quorum_id)
        else:
            self._announced_by_another(job, members, quorum_id)
        if quorum_id >= self._announced[0]:
            self._announced = quorum_id, members
            self._last_members = members
        self._done = self._done or (self._quiet and not self._script_runs and self._recovered())

    def _announced_by_the_leader(self, node: Node, members: tuple[str, ...], quorum_id: int) -> None:
        record = self.stored
        if (record.quorum_id, record.members) != (quorum_id, members):
            self.violated(f"{node.name} announces quorum {quorum_id} of {members}, {record} is written")
        if quorum_id < self._announced[0]:
            self.violated(f"{node.name} leads and goes back from quorum {self._announced[0]} to {quorum_id}")
        if len(members) < max(1, record.policy.min_replicas):
            self.violated(f"quorum {quorum_id} of {members} is below min_replicas {record.policy.min_replicas}")
        if gone := set(members) & set(record.evicted):
            self.violated(f"quorum {quorum_id} holds the evicted {gone}")

    def _announced_by_another(self, job: Job, members: tuple[str, ...], quorum_id: int) -> None:
        """Deposed, and does not know it yet."""
        node, epoch = self.node_of(job), job.term.epoch
        last = self._last_quorum_of.get(epoch)
        if last is not None and quorum_id != last:
            self.violated(f"{node.name}, deposed, announces quorum {quorum_id}; the last of epoch {epoch} was {last}")
        if self._announced[0] > quorum_id and not set(members) & set(self._announced[1]):
            there = [w for m in members if (w := self.workers[m]).alive and self._is_in_session(w, node)]
            if len(there) == len(members):
                self.violated(f"{node.name}, deposed, answers {members} after quorum {self._announced} was announced")

    def _is_in_session(self, worker: Worker, node: Node) -> bool:
        return worker.connection is not None and any(worker.connection is one.connection for one in node.sockets)

    def told(self, job: Job, tell: Tell) -> None:
        if isinstance(tell.message, Evicted):
            for number in tell.to:
                if (session := job.sessions.get(number)) and session.replica_id not in self._written_evictions:
                    self.violated(f"{session.replica_id} hears of an eviction that is not written")

    def checked(self, job: Job) -> None:
        self._events += 1
        if self._careful or self._events % 64 == 0:
            try:
                job.core.validate()
            except AssertionError as error:
                self.violated(f"the core of {self.node_of(job).name} is inconsistent: {error}")

    @property
    def announced_quorum(self) -> int:
        """The highest so far."""
        return self._announced[0]


def _line_of(script: Script) -> int:
    while isinstance(script.gi_yieldfrom, Generator):
        script = script.gi_yieldfrom
    return script.gi_frame.f_lineno
