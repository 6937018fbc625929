"""Replica groups that train in virtual time, their network, and what must hold of them whatever the lighthouse does.

* Equal (step, lineage) means equal state, over all groups that ever lived; one collective is for one step, under one
  policy of healing.
* Every group takes the same groups for the members of a quorum.
* Groups whose states are compared are found equal, as long as no bit flipped.
* What lighthouses and groups wrote down passes ``keepstep check-history``.
* Once the faults stop, all groups soon train in one quorum, in equal states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random
from typing import Any

from keepstep.group.quorum_plan import QuorumPlan
from keepstep_lighthouse.quorum.events import Policy
from keepstep_lighthouse.quorum.machine import JobCore
from keepstep_mesh.protocol.membership import Lineage
from tests.simulation.history import Logs, report_on
from tests.simulation.network import Connection, Timeline
from tests.simulation.worker import Collective, Worker

FAULT_SECONDS = 12.0
RECOVERY_SECONDS = 120.0
"""Virtual; join, heal, collective and heartbeat timeouts one after another fit in it."""
COMMITS_AFTER = 3


class Violation(Exception):
    """Something that always holds did not."""


class Training(ABC):
    """``run`` raises ``Violation``. ``careful``: the core is validated after every event. ``quiet_at``: faults end."""

    def __init__(
        self, random: Random, names: list[str], policy: Policy, *, careful: bool, quiet_at: float = FAULT_SECONDS
    ) -> None:
        self.random = random
        self.time = Timeline()
        self.logs = Logs()
        self.trace: list[str] = []
        self.tracing = False
        self._careful = careful
        self._events = 0
        self.names = names
        self.policy = policy
        self.slow_heals: dict[str, float] = {}
        """By name: seconds that its next heal takes."""
        self.workers: dict[str, Worker] = {}
        self.latest: dict[str, Worker] = {}
        self._launched = 0
        self._connections = 0
        self.parted_pairs: set[frozenset[str]] = set()
        self.waiting: list[Collective] = []
        self._collectives: dict[tuple[int, int], Collective] = {}
        self._states: dict[tuple[int, Lineage], int] = {}
        self._memberships: dict[int, tuple[str, ...]] = {}
        self.rounds = 0
        self.flips = 0
        self.forbids_heal = 0.0
        """How often a group allows no heal in a round, until the faults end."""
        self._healing = Random("healing")
        self._quiet_at = quiet_at
        self._quiet = self._done = False
        self._last_members: tuple[str, ...] = ()
        self._commits_then: dict[str, int] = {}

    def run(self) -> None:
        self.time.run(self._quiet_at + RECOVERY_SECONDS, lambda: self._done)
        if not self._done:
            self.violated(f"no common quorum {RECOVERY_SECONDS:g} s after the last fault: {self.why_not()}")
        if not self.flips and any(
            '"kind": "replicas_differ"' in line for log in self.logs.lines.values() for line in log
        ):
            self.violated("equal groups were found to differ")
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

    # ---- what the lighthouse is to it

    @abstractmethod
    def dial(self, worker: Worker) -> Connection | None:
        """A connection to a lighthouse, if it can be reached."""

    @abstractmethod
    def order(self, order: Any) -> None:
        """An administrator's order to the lighthouse; it is lost when that is down."""

    @abstractmethod
    def why_not(self) -> str:
        """Why there is no common quorum."""

    # ---- what must hold

    def violated(self, what: str) -> None:
        raise Violation(what)

    def check_state(self, worker: Worker) -> None:
        key = (worker.step, worker.lineage)
        if not worker.flipped and self._states.setdefault(key, worker.state) != worker.state:
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

    # ---- the groups

    def know(self, worker: Worker) -> None:
        self.workers[worker.replica_id] = worker
        self.latest[worker.name] = worker
        self.check_state(worker)

    def allows_heal(self) -> bool:
        return self._quiet or self._healing.random() >= self.forbids_heal

    def forbid_heals(self, seed: int) -> None:
        """In some simulations groups allow no heal now and then. Draws nothing from what the others are made of."""
        self.forbids_heal = Random(f"healing {seed}").choice((0.0, 0.0, 0.1, 0.5))

    def launch(self, name: str) -> Worker:
        self._launched += 1
        self.note(f"{name}:{self._launched} starts")
        return self.new_worker(name, self._launched)

    def new_worker(self, name: str, number: int) -> Worker:
        return Worker(self, name, number)

    def launch_later(self, name: str) -> None:
        self.time.after(0.2 + 1.5 * self.random.random(), self.relaunch, name)

    def relaunch(self, name: str) -> None:
        if not self.latest[name].alive:
            self.launch(name)

    # ---- collectives

    def collective(self, key: tuple[int, int], plan: QuorumPlan, worker: Worker) -> Collective:
        facts = (plan.max_step, plan.lineage, plan.allow_heal)
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

    def stop_faults(self) -> None:
        """The network is whole, everybody runs, everything that is down is started."""
        self.note("the faults stop")
        self._quiet = True
        self._commits_then = {replica_id: worker.commits for replica_id, worker in self.workers.items()}
        for name in self.names:
            self.time.after(8.0, self.relaunch, name)

    # ---- for people

    def note(self, text: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.time.now:8.4f}  {text}")
