"""One job in virtual time: replica groups that train, their lighthouses, the network, and faults from a seed.

The lighthouses run the product's own code: one with a store of its own, or several that share a store and elect a
leader. ``checks`` has the rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import replace
from random import Random
from typing import Any

from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.leadership.term import EPOCH_KEY
from keepstep_lighthouse.quorum.events import ReadmitOrdered
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_mesh.protocol.policy import Policy
from tests.simulation.actors.collectives import Collectives
from tests.simulation.actors.incarnation import Incarnation
from tests.simulation.actors.member import Member
from tests.simulation.actors.node import Node, address_of, simulated
from tests.simulation.actors.ports import Network
from tests.simulation.actors.troubles import Troubles
from tests.simulation.actors.worker import Worker
from tests.simulation.checks.hangs import HANG_AFTER, HangChecks
from tests.simulation.checks.history import Logs
from tests.simulation.checks.quorums import QuorumChecks
from tests.simulation.checks.shards import ShardChecks
from tests.simulation.checks.spares import SpareChecks
from tests.simulation.checks.states import Checkpoint, StateChecks
from tests.simulation.checks.violation import Violation
from tests.simulation.faults.drawing import LAST_SECOND, Fault, draw_faults, inject
from tests.simulation.virtual.mesh import Mesh
from tests.simulation.virtual.network import Connection, End, Timeline
from tests.simulation.virtual.process import begin_ordinals
from tests.simulation.virtual.store import SharedStore
from tests.simulation.virtual.wires import Socket

RECOVERY_SECONDS = 120.0
"""Virtual seconds. Join, heal, collective and heartbeat timeouts, one after another, fit in."""
LAST_RESTART_SECONDS = 8.0
"""After the end of the faults: everything that is still down is started."""
READMIT_SECONDS = (20.0, 40.0, 60.0)
"""After the end of the faults, an administrator ends the probation of each group, so that recovery takes no longer."""
OPERATOR_SECONDS = (15.0, 35.0, 55.0, 75.0, 90.0)
"""After the end of the faults, an operator looks for groups that hang and are not ended."""
LIGHTHOUSES = (1, 1, 1, 1, 2, 2, 2, 3)
LEASES = (3.0, 3.0, 6.0)
RATES = (0.95, 1.05)
POLL_SECONDS = 0.005
LAST_STEP = 30
"""Largest last step; groups reach it before, while, or after the faults happen."""
FINISH_GRACES = (0.5, 3.0, 15.0)
SCRIPT_SECONDS = 60.0

Script = Generator[float | Callable[[], bool], None, None]
"""Faults by hand: yields seconds to wait, or a condition to wait for."""


class Simulation:
    """``run`` raises ``Violation`` when a rule is broken. Arguments that are None are drawn from the seed.

    Args:
        seed: Equal seeds give equal runs.
        faults: The faults to inject.
        groups: Number of replica groups.
        policy: Policy of the job. A given policy also makes all groups allow heals.
        lighthouses: Number of lighthouses. One has a store of its own; several share one.
        lease: ``--lease`` of all lighthouses, in seconds.
        rate: Seconds of the lighthouses' clocks per virtual second.
        careful: Validate the core after every event.
        quiet_at: Virtual second after which no fault happens and the job must recover.
        finishes: The groups take a last step, drawn from the seed, and finish together.
        catches_up: Groups that are behind follow the others instead of healing.
        ports: Groups listen on ports, and lighthouses look at the ports of suspects.
        retries: The groups take a step again that failed because of other groups (``retry_allreduce``).
        spares: One to three more groups stand by, and groups are replaced.
        troubles: Groups keep others from committing, and send evidence about steps that failed.
        hangs: Training threads of groups hang, or are slow.
        one_copy: The model exists once: the groups are members of one or two ranks, which keep copies of each other.
    """

    def __init__(
        self,
        seed: int,
        faults: tuple[Fault, ...] | None = None,
        *,
        groups: int | None = None,
        policy: Policy | None = None,
        lighthouses: int | None = None,
        lease: float | None = None,
        rate: float | None = None,
        careful: bool = False,
        quiet_at: float = LAST_SECOND,
        finishes: bool = False,
        catches_up: bool | None = None,
        ports: bool = False,
        retries: bool = False,
        spares: bool = False,
        troubles: bool = False,
        hangs: bool = False,
        one_copy: bool = False,
    ) -> None:
        begin_ordinals()
        random = self.random = Random(f"simulation {seed}")
        self.time = Timeline()
        self.trace: list[str] = []
        self.tracing = False
        self.raises = True
        """False: ignore broken rules, to see what they leave in the logs."""
        self._violation: Violation | None = None
        self._quiet = self._script_runs = self._done = False
        self._quiet_at = quiet_at
        self.retries = retries

        count = random.choice(LIGHTHOUSES)
        count = lighthouses or count
        groups = groups or random.randint(1, 5)
        groups += one_copy
        self.workers: dict[str, Any] = {}
        """By replica_id."""
        self.spares = SpareChecks(seed, groups, self.workers, self.violated) if spares and not one_copy else None
        standing_by = self.spares.count if self.spares else int(spares)
        self.shards = ShardChecks(self, seed, groups, spares=spares) if one_copy else None
        self.names = [f"r{number}" for number in range(groups + standing_by)]
        self.forbids_heal = 0.0 if policy is not None else Random(f"healing {seed}").choice((0.0, 0.0, 0.1, 0.5))
        """How often a group allows no heal in a round, until the faults end."""
        self._healing = Random("healing")
        way = Random(f"catching up {seed}").random()
        self.replays_unasked = catches_up is None and (retries or way >= 0.5)
        """Whether groups follow by default: a replay may give other weights, so that they heal after it."""
        if catches_up is None:
            catches_up = way < 0.8
        self.catches_up = catches_up
        """Whether groups that are behind follow the others, instead of healing while these wait."""
        self.policy = policy or _draw_policy(random, groups)
        if self.shards is not None and policy is None:
            # without a grace, members that live are lost after each takeover
            fitting = self.shards.fitting(self.policy.min_replicas)
            self.policy = replace(self.policy, min_replicas=fitting, takeover_grace=None)
        self.last_step: int | None = None
        """Step after which no group trains; None: they train for ever."""
        self.publishes = finishes and seed % 4 == 1
        """Whether the groups publish their final state."""
        self.ended: set[str] = set()
        """Names of groups that finished or were refused, and are not started again."""
        if finishes:
            end = Random(f"end {seed}")
            self.last_step = end.randint(1, LAST_STEP)
            self.policy = replace(self.policy, finish_grace=end.choice(FINISH_GRACES))

        self.hangs = HangChecks(self.violated) if hangs else None
        if hangs:
            self.policy = replace(self.policy, hang_after=HANG_AFTER)
        self.ports = Network(seed, self.names, self.violated) if ports else None
        self.logs = Logs()
        self.mesh = Mesh(self.time, random, self.note)
        self.collectives = Collectives(self.time, random, self.violated)
        self.troubles = Troubles(seed, self.collectives) if troubles else None
        self.quorums = QuorumChecks(self, self.violated, careful=careful)
        self.states = StateChecks(self.quorums.memberships, self.violated)
        self.store = SharedStore(self.time, random, self.quorums.on_write)

        self.latest: dict[str, Any] = {}
        """By name of the group."""
        self.slow_heals: dict[str, float] = {}
        """By name: the seconds that its next heal takes."""
        self.checkpoints: list[Checkpoint] = []
        """All that the groups saved, in order."""
        self.resume_from: dict[str, Checkpoint] = {}
        """By name: the checkpoint that its next incarnation resumes from."""
        self._launched = itertools.count(1)

        names = "ABC"[:count]
        self._lease = dict.fromkeys(names, lease or random.choice(LEASES))
        if lease is None and random.random() < 0.2:  # in the middle of a change of --lease
            self._lease[names[0]] = random.choice(LEASES)
        self._rate = {name: rate or random.uniform(*RATES) for name in names}
        self._started = itertools.count(1)
        self.nodes: dict[str, Node] = {}
        """By address."""
        for name in names:
            self.time.at(0.0, self._start_lighthouse, name)
        for name in self.names:
            self.time.after(0.3 * random.random(), self.launch, name)
        self.faults = (
            draw_faults(seed, count, spares=spares, troubles=troubles, hangs=hangs, one_copy=one_copy)
            if faults is None
            else faults
        )
        for fault in self.faults:
            self.time.at(fault.at, inject, self, fault)
        self.time.at(quiet_at, self._stop_faults)

    # ---- running

    def run(self) -> None:
        with simulated(self):
            try:
                self.time.run(self._quiet_at + RECOVERY_SECONDS)
                if self._violation is None and not self._done and not (self.shards and self.shards.over):
                    why = self._why_no_quorum()
                    self.violated(f"no common quorum {RECOVERY_SECONDS:g} s after the last fault: {why}")
            finally:
                for node in self.nodes.values():
                    node.kill()
        if self._violation is not None:
            raise self._violation
        self.states.check_logs(self.logs)

    def play(self, script: Callable[[Simulation], Script]) -> None:
        """Run with the faults of ``script``."""
        self._script_runs = True
        self.time.at(0.0, self._follow, script(self), None, 0.0)
        self.run()

    def _follow(self, script: Script, condition: Callable[[], bool] | None, since: float) -> None:
        if condition is not None and not condition():
            if self.time.now - since > SCRIPT_SECONDS:
                self.violated(f"the script waits in vain in line {_line_of(script)}")
            self.time.after(POLL_SECONDS, self._follow, script, condition, since)
            return
        for wanted in script:
            if callable(wanted):
                self.time.after(0.0, self._follow, script, wanted, self.time.now)
            else:
                self.time.after(wanted, self._follow, script, None, 0.0)
            return
        self._script_runs = False

    def _stop_faults(self) -> None:
        """Wait for recovery: from now on nothing fails, and all that is down is started."""
        self.note("the faults stop")
        self._quiet = True
        (self.shards or self.states).faults_stopped(self.workers)
        for seconds in OPERATOR_SECONDS if self.hangs else ():
            self.time.after(seconds, self._end_spared)
        for name in self.names:
            self.time.after(LAST_RESTART_SECONDS, self._relaunch, name)
            if self.troubles is not None:
                self.troubles.end(name)
            if self.troubles is not None or self.hangs is not None:
                for seconds in READMIT_SECONDS:
                    self.time.after(seconds, self.order, ReadmitOrdered(name, "ann"))
        for node in self.nodes.values():
            self.time.after(LAST_RESTART_SECONDS, self._restart_lighthouse, node.name)

    def _end_spared(self) -> None:
        """As an operator: end the groups that hang and that the lighthouse spares."""
        if self.hangs is None or self.leader is None:
            return
        said, spares = self.leader.spared_hangs()
        groups = [one for one in self.latest.values() if one.replica_id not in spares]
        for worker in list(self.latest.values()):
            if worker.alive and f"{worker.replica_id} " in said:
                if worker in groups:
                    self.hangs.on_spared(worker, groups)
                worker.die()
                self._relaunch(worker.name)

    def stop_if_recovered(self) -> None:
        if self.last_step is not None:
            self._done = self.ended.issuperset(self.names)
        elif self.shards is not None:
            most = self.stored.policy.max_replicas
            self._done = self._quiet and self.shards.recovered(self.latest, self.quorums.highest.members, most)
        elif self._quiet and not self._script_runs:
            spares = self.spares.count if self.spares is not None else 0
            members = self.quorums.highest.members
            ordered = len(members) < len(self.names) and self.stored.replacing  # else no spare is left
            self._done = not ordered and self.states.recovered(self.latest, members, spares)
        if self._done:
            self.time.stop()

    def on_ended(self, worker: Incarnation) -> None:
        """A group ends for good, because the job does."""
        self.ended.add(worker.name)
        self.stop_if_recovered()

    def _why_no_quorum(self) -> str:
        return "; ".join(node.why_no_quorum() for node in self.nodes.values())

    # ---- violations

    def violated(self, what: str) -> None:
        """Raise ``Violation``, and remember it: the product may catch what is raised within it."""
        if not self.raises:
            return
        if self._violation is None:
            self._violation = Violation(what)
            self.note(f"VIOLATED {what}")
        self.time.stop()
        raise self._violation

    def on_fault(self, what: str) -> None:
        """A process has a fault of its own."""
        if not self.raises:
            return
        if self._violation is None:
            self._violation = Violation(f"a fault in a process: {what}")
            self.note(f"VIOLATED {self._violation}")
        self.time.stop()

    def on_logged_exception(self, what: str) -> None:
        if not any(node.loop.dead for node in self.nodes.values() if node.loop.is_running()):
            self.on_fault(what)

    def note(self, text: str) -> None:
        """Add a line to the trace, for people."""
        if self.tracing:
            self.trace.append(f"{self.time.now:8.4f}  {text}")

    # ---- groups

    def add_worker(self, worker: Incarnation) -> None:
        self.workers[worker.replica_id] = worker
        self.latest[worker.name] = worker

    def allows_heal(self) -> bool:
        return self._quiet or self._healing.random() >= self.forbids_heal

    def launch(self, name: str) -> Incarnation:
        number = next(self._launched)
        self.note(f"{name}:{number} starts")
        if self.shards is not None:
            return Member(self, name, number)
        return Worker(self, name, number, self.resume_from.pop(name, None))

    def launch_later(self, name: str) -> None:
        self.time.after(0.2 + 1.5 * self.random.random(), self._relaunch, name)

    def _relaunch(self, name: str) -> None:
        if not self.latest[name].alive and name not in self.ended:
            self.launch(name)

    def addresses(self) -> list[str]:
        """The lighthouse addresses of a group, in random order."""
        addresses = list(self.nodes)
        self.random.shuffle(addresses)
        return addresses

    def dial(self, name: str, client: End, address: str) -> Connection | None:
        """Connect the group ``name`` to a lighthouse. None: connection refused, or no route."""
        node = self.nodes[address]
        if node.loop.dead:
            return None
        if self.mesh.is_partitioned(name, address):
            nowhere = Connection(client, client, self.time, self.random)
            nowhere.partition()
            return nowhere if self.random.random() < 0.5 else None
        socket = Socket(node, name)
        connection = socket.connection = self.mesh.connect(name, client, address, socket)
        node.accept(socket)
        return connection

    # ---- lighthouses

    @property
    def stored(self) -> JobRecord:
        """The record of the job in the store."""
        return self.quorums.stored

    @property
    def epoch(self) -> int:
        """The epoch in the store."""
        return int(self.store.values.get(EPOCH_KEY, b"0"))

    @property
    def leader(self) -> Node | None:
        """The lighthouse that leads in its own opinion and by what the store says."""
        return next((node for node in self.nodes.values() if node.leads and node.leads_in_store), None)

    def node_of(self, job: Job) -> Node:
        return next(node for node in self.nodes.values() if node.loop is job._loop)

    def running_node(self) -> str:
        return next((node.name for node in self.nodes.values() if node.loop.is_running()), "-")

    def order(self, order: Any) -> None:
        """Give an administrator's order to the leader. Without a leader the order is lost."""
        leader = self.leader
        if leader is not None and not leader.loop.asleep:
            leader.order(order)

    def _start_lighthouse(self, name: str) -> None:
        self.note(f"{name} starts")
        alone = len(self._lease) == 1
        number = next(self._started)
        node = Node(self, name, number, rate=self._rate[name], lease=self._lease[name], alone=alone)
        self.nodes[node.address] = node

    def _restart_lighthouse(self, name: str) -> None:
        if self.nodes[address_of(name)].loop.dead:
            self._start_lighthouse(name)

    # ---- faults of lighthouses and their store

    def kill_lighthouse(self, node: Node, seconds: float) -> None:
        """Kill a lighthouse and start it again after ``seconds``."""
        if not node.loop.dead:
            self.note(f"{node.name} is dead")
            node.kill()
            self.time.after(seconds, self._restart_lighthouse, node.name)

    def restart_with_lease(self, node: Node, lease: float) -> None:
        self._lease[node.name] = lease
        self.kill_lighthouse(node, 0.1)

    def pause(self, node: Node, seconds: float) -> None:
        if not node.loop.dead and not node.loop.asleep:
            self.note(f"{node.name} sleeps")
            node.loop.sleep()
            self.time.after(seconds, self._wake, node)

    def _wake(self, node: Node) -> None:
        self.note(f"{node.name} wakes")
        node.loop.wake()

    def cut_from_the_store(self, node: Node, seconds: float) -> None:
        self.note(f"{node.name} is cut off from the store")
        node.store.cut_off = True
        self.time.after(seconds, self._rejoin_the_store, node)

    def _rejoin_the_store(self, node: Node) -> None:
        node.store.cut_off = False
        self.store.report_missed()

    def deafen(self, node: Node, seconds: float) -> None:
        """The watches of ``node`` report nothing."""
        node.store.deaf = True
        self.time.after(seconds, self._hear_again, node)

    def _hear_again(self, node: Node) -> None:
        node.store.deaf = False
        self.store.report_missed()

    def bring_the_store_back(self) -> None:
        self.store.away = False
        self.store.report_missed()


def _draw_policy(random: Random, groups: int) -> Policy:
    return Policy(
        min_replicas=random.choice((1, random.randint(1, groups))),
        max_replicas=random.choice((0, 0, 0, groups)),
        initial_replicas=random.choice((0, groups)),
        join_timeout=random.choice((1.0, 4.0)),
        heal_timeout=3.0,
        heartbeat_timeout=random.choice((2.5, 5.0)),
        takeover_grace=random.choice((None, None, 0.2)),
        verify_every=1,
    )


def _line_of(script: Any) -> int:
    while isinstance(script.gi_yieldfrom, Generator):
        script = script.gi_yieldfrom
    return int(script.gi_frame.f_lineno)
