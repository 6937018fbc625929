"""One job, its network and its one lighthouse in virtual time, with faults from a seed, and what must hold.

Beside what must hold of every ``Training``:

* One membership per quorum_id. quorum_id and epoch never go back, and what is announced was written before.
* No quorum below min_replicas or empty; nobody in it that was evicted or whose session is over.
"""

from __future__ import annotations

from random import Random
from typing import Any

from keepstep_lighthouse.quorum.events import Announce, JobRecord, Persist, Policy, Tick
from tests.simulation.faults import Fault, faults_of, inject
from tests.simulation.lighthouse import Lighthouse, Store
from tests.simulation.network import Connection
from tests.simulation.training import FAULT_SECONDS, Training, Violation
from tests.simulation.worker import Worker

__all__ = ["Simulation", "Violation"]


class Simulation(Training):
    def __init__(self, seed: int, faults: tuple[Fault, ...] | None = None, *, careful: bool = False) -> None:
        random = Random(f"network {seed}")
        groups = random.randint(1, 5)
        minimum = random.randint(1, groups)
        policy = Policy(
            min_replicas=minimum,
            max_replicas=random.choice((0, 0, 0, groups)),
            initial_replicas=random.choice((0, groups)),
            join_timeout=4.0,
            heal_timeout=3.0,
            verify_every=1,
        )
        super().__init__(random, [f"r{number}" for number in range(groups)], policy, careful=careful)
        self.forbid_heals(seed)
        self.store = Store(JobRecord(policy=self.policy))
        self.parted_from_lighthouse: set[str] = set()
        self._highest = 0
        self._last_round = (0, 0, 0, 0)
        """Epoch, quorum_id, version and step of what was announced last."""
        self.lighthouse = Lighthouse(self, self.store, self.random)
        for name in self.names:
            self.time.after(0.3 * self.random.random(), self.launch, name)
        for fault in faults_of(seed) if faults is None else faults:
            self.time.at(fault.at, inject, self, fault)
        self.time.at(FAULT_SECONDS, self.stop_faults)

    def why_not(self) -> str:
        return self.lighthouse.core.reason(self.time.now).sentence

    # ---- what must hold

    def announced(self, lighthouse: Lighthouse, announce: Announce) -> None:
        members = tuple(member.replica_id for member in announce.listed)
        record = self.store.record
        round_ = lighthouse.epoch, announce.quorum_id, announce.version, announce.step
        if len(announce.to) != len(members) or round_ == self._last_round:
            return  # an answer that is given again
        self._last_round = round_
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

    # ---- the mesh

    def start_lighthouse(self) -> None:
        if not self.lighthouse.alive:
            self.note("the lighthouse starts anew")
            self.lighthouse = Lighthouse(self, self.store, self.random)

    def dial(self, worker: Worker) -> Connection | None:
        """A connection to the lighthouse, if it can be reached."""
        if not self.lighthouse.alive or worker.name in self.parted_from_lighthouse:
            return None
        self._connections += 1
        return Connection(self._connections, worker, self.lighthouse, self.time, self.random)

    def order(self, order: Any) -> None:
        if self.lighthouse.alive and not self.lighthouse.asleep:
            self.lighthouse.handle(order)

    def beats(self, replica_id: str) -> bool:
        worker = self.workers[replica_id]
        return worker.alive and not worker.frozen

    def stop_faults(self) -> None:
        super().stop_faults()
        self.time.after(8.0, self.start_lighthouse)

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
