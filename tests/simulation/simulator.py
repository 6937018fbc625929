"""One job, its network and its lighthouse in virtual time, with faults from a seed, and what must hold whatever comes.

* One membership per quorum_id. quorum_id and epoch never go back, and what is announced was written before.
* No quorum below min_replicas or empty; nobody in it that was evicted or whose session is over.
* Equal (step, lineage) means equal state, over all groups that ever lived; one collective is for one step.
* What lighthouses and groups wrote down passes ``keepstep check-history``.
* Once the faults stop, all groups soon train in one quorum, in equal states.
"""

from __future__ import annotations

from random import Random
from typing import Any

from keepstep.quorum_plan import QuorumPlan
from keepstep_lighthouse.core import JobCore
from keepstep_lighthouse.events import Announce, JobRecord, Persist, Policy, Tick
from keepstep_mesh.messages import Lineage
from simulation.faults import FAULT_SECONDS, Fault, faults_of, inject
from simulation.history import Logs, report_on
from simulation.lighthouse import Lighthouse, Store
from simulation.network import Connection, Timeline
from simulation.worker import Collective, Worker

RECOVERY_SECONDS = 120.0
"""Virtual; join, heal, collective and heartbeat timeouts one after another fit in it."""
COMMITS_AFTER = 3


class Violation(Exception):
    """Something that always holds did not."""


class Simulation:
    """``run`` raises ``Violation``. ``careful``: the core is validated after every event."""

    def __init__(self, seed: int, faults: tuple[Fault, ...] | None = None, *, careful: bool = False) -> None:
        self.random = Random(f"network {seed}")
        self.time = Timeline()
        self.logs = Logs()
        self.trace: list[str] = []
        self.tracing = False
        self._careful = careful
        self._events = 0
        groups = self.random.randint(1, 5)
        minimum = self.random.randint(1, groups)
        self.policy = Policy(
            min_replicas=minimum,
            max_replicas=self.random.choice((0, 0, 0, groups)),
            initial_replicas=self.random.choice((0, groups)),
            join_timeout=4.0,
            heal_timeout=3.0,
        )
        self.store = Store(JobRecord(policy=self.policy))
        self.slow_heals: dict[str, float] = {}
        """By name: seconds that its next heal takes."""
        self.workers: dict[str, Worker] = {}
        self.latest: dict[str, Worker] = {}
        self._launched = 0
        self._connections = 0
        self.parted_pairs: set[frozenset[str]] = set()
        self.parted_from_lighthouse: set[str] = set()
        self.waiting: list[Collective] = []
        self._collectives: dict[tuple[int, int], Collective] = {}
        self._states: dict[tuple[int, Lineage], int] = {}
        self._memberships: dict[int, tuple[str, ...]] = {}
        self._highest = 0
        self.rounds = 0
        self._quiet = self._done = False
        self._last_members: tuple[str, ...] = ()
        self._commits_then: dict[str, int] = {}
        self.lighthouse = Lighthouse(self, self.store, self.random)
        self.names = [f"r{number}" for number in range(groups)]
        for name in self.names:
            self.time.after(0.3 * self.random.random(), self.launch, name)
        for fault in faults_of(seed) if faults is None else faults:
            self.time.at(fault.at, inject, self, fault)
        self.time.at(FAULT_SECONDS, self._stop_faults)

    def run(self) -> None:
        self.time.run(FAULT_SECONDS + RECOVERY_SECONDS, lambda: self._done)
        if not self._done:
            reason = self.lighthouse.core.reason(self.time.now)
            self.violated(f"no common quorum {RECOVERY_SECONDS:g} s after the last fault: {reason.sentence}")
        for violation in report_on(self.logs.lines).violations:
            self.violated(f"the history is wrong, {violation.rule}: {violation.what}")

    def _recovered(self) -> bool:
        """All groups are in the last quorum and have committed since the faults stopped, and stand at one state."""
        living = [worker for worker in self.latest.values() if worker.alive]
        if len(living) < len(self.names) or set(self._last_members) != {worker.replica_id for worker in living}:
            return False
        if any(w.commits - self._commits_then.get(w.replica_id, 0) < COMMITS_AFTER for w in living):
            return False
        return len({(worker.step, worker.lineage, worker.state) for worker in living}) == 1

    # ---- what must hold

    def violated(self, what: str) -> None:
        raise Violation(what)

    def announced(self, lighthouse: Lighthouse, announce: Announce) -> None:
        members = tuple(member.replica_id for member in announce.listed)
        record = self.store.record
        if len(announce.to) != len(members):
            return  # an answer that is given again
        self.rounds += 1
        if self._memberships.setdefault(announce.quorum_id, members) != members:
            self.violated(f"quorum {announce.quorum_id} is {self._memberships[announce.quorum_id]} and {members}")
        if announce.quorum_id < self._highest:
            self.violated(f"quorum_id went back from {self._highest} to {announce.quorum_id}")
        if (record.quorum_id, record.members) != (announce.quorum_id, members):
            self.violated(f"quorum {announce.quorum_id} of {members} is announced, {record} is written")
        if lighthouse.epoch != self.store.epoch:
            self.violated(f"epoch {lighthouse.epoch} announces in epoch {self.store.epoch}")
        if len(members) < max(1, record.policy.min_replicas):
            self.violated(
                f"quorum {announce.quorum_id} of {members} is below min_replicas {record.policy.min_replicas}"
            )
        if gone := set(members) & set(record.evicted):
            self.violated(f"quorum {announce.quorum_id} holds the evicted {gone}")
        self._highest = announce.quorum_id
        self._last_members = members
        self._done = self._quiet and self._recovered()

    def check_state(self, worker: Worker) -> None:
        key = (worker.step, worker.lineage)
        if self._states.setdefault(key, worker.state) != worker.state:
            self.violated(f"{worker.replica_id} stands at step {key[0]}, lineage {key[1]!r}, in a state of its own")

    def check_plan(self, worker: Worker, plan: QuorumPlan) -> None:
        if self._memberships[plan.quorum_id] != plan.replica_ids:
            self.violated(f"{worker.replica_id} believes that quorum {plan.quorum_id} is {plan.replica_ids}")

    def after_event(self, core: JobCore) -> None:
        self._events += 1
        if self._careful or self._events % 64 == 0:
            try:
                core.validate()
            except AssertionError as error:
                self.violated(f"the core is inconsistent: {error}")

    # ---- the mesh

    def know(self, worker: Worker) -> None:
        self.workers[worker.replica_id] = worker
        self.latest[worker.name] = worker
        self.check_state(worker)

    def launch(self, name: str) -> Worker:
        self._launched += 1
        self.note(f"{name}:{self._launched} starts")
        return Worker(self, name, self._launched)

    def start_lighthouse(self) -> None:
        if not self.lighthouse.alive:
            self.note("the lighthouse starts anew")
            self.lighthouse = Lighthouse(self, self.store, self.random)

    def launch_later(self, name: str) -> None:
        self.time.after(0.2 + 1.5 * self.random.random(), self.relaunch, name)

    def relaunch(self, name: str) -> None:
        if not self.latest[name].alive:
            self.launch(name)

    def dial(self, worker: Worker) -> Connection | None:
        """A connection to the lighthouse, if it can be reached."""
        if not self.lighthouse.alive or worker.name in self.parted_from_lighthouse:
            return None
        self._connections += 1
        return Connection(self._connections, worker, self.lighthouse, self.time, self.random)

    def beats(self, replica_id: str) -> bool:
        worker = self.workers[replica_id]
        return worker.alive and not worker.frozen

    # ---- collectives

    def collective(self, key: tuple[int, int], plan: QuorumPlan, worker: Worker) -> Collective:
        facts = (plan.max_step, plan.lineage)
        collective = self._collectives.get(key)
        if collective is None:
            collective = self._collectives[key] = Collective(plan.replica_ids, facts)
        if collective.facts != facts:
            self.violated(f"{worker.replica_id} reduces step {facts}, the others of quorum {key[0]} {collective.facts}")
        return collective

    def parted(self, one: Worker, other: Worker) -> bool:
        return bool(self.parted_pairs) and frozenset((one.name, other.name)) in self.parted_pairs

    def contribute(self, collective: Collective, worker: Worker, part: int | None) -> None:
        collective.parts[worker.replica_id] = (worker, part)
        if collective.dead:
            self._fail(collective, worker)
        else:
            self.try_complete(collective)

    def try_complete(self, collective: Collective) -> None:
        if collective.dead or len(collective.parts) < len(collective.members):
            return
        workers = [worker for worker, _ in collective.parts.values()]
        if self.parted_pairs and any(self.parted(a, b) for a in workers for b in workers):
            self.waiting.append(collective)
            return
        result = collective.result()
        for worker in workers:
            self.time.after(0.001 + 0.01 * self.random.random(), self._finish, collective, worker, result)

    def _finish(self, collective: Collective, worker: Worker, result: int) -> None:
        """The result is there, unless a peer went in the last moment."""
        if not collective.dead or self.random.random() < 0.5:
            worker.reduced(collective, result)
        else:
            self._fail(collective, worker)

    def drop(self, collective: Collective, worker: Worker) -> None:
        """A member goes, or gives the collective up. Some of the others see their sockets fail, some see nothing."""
        if not collective.dead:
            collective.dead = True
            for other, _ in collective.parts.values():
                if other is not worker:
                    self._fail(collective, other)

    def _fail(self, collective: Collective, worker: Worker) -> None:
        if self.random.random() < 0.7:
            self.time.after(0.01 * self.random.random(), worker.reduced, collective, None)

    # ---- the end

    def _stop_faults(self) -> None:
        """The network is whole, everybody runs, everything that is down is started."""
        self.note("the faults stop")
        self._quiet = True
        self._commits_then = {replica_id: worker.commits for replica_id, worker in self.workers.items()}
        self.time.after(8.0, self.start_lighthouse)
        for name in self.names:
            self.time.after(8.0, self.relaunch, name)

    # ---- for people

    def note(self, text: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.time.now:8.4f}  {text}")

    def trace_event(self, event: Any, decisions: list[Any]) -> None:
        if self.tracing and (decisions or not isinstance(event, Tick)):
            self.note(f"{event}")
            for decision in decisions:
                said: Any = decision
                if isinstance(decision, Announce):
                    members = " ".join(member.replica_id for member in decision.listed)
                    said = f"Announce quorum {decision.quorum_id} of {members}, step {decision.step} to {decision.to}"
                elif isinstance(decision, Persist):
                    said = f"Persist quorum {decision.record.quorum_id} of {' '.join(decision.record.members)}"
                self.trace.append(f"            {said}")
