"""One job whose lighthouses stand by for each other, in virtual time: the real shell, election and store contract.

Beside what must hold of every ``Training``, over all lighthouses together:

* One membership per quorum_id. In the store quorum_id and epoch never go back; for no group do they.
* What is announced was written before. Who was deposed may confirm the last quorum that it wrote, until its lease is
  over; never when a quorum of others was announced meanwhile and all its members are still in session with it.
* No quorum below min_replicas; nobody in it that was evicted; nobody hears of an eviction that is not written.
* No process has a fault of its own, or waits for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from random import Random
from typing import Any

from keepstep_lighthouse import records
from keepstep_lighthouse.events import Announce, JobRecord, Policy, Tell
from keepstep_lighthouse.jobs import Job
from keepstep_lighthouse.leadership import LEADER_KEY
from keepstep_lighthouse.records import JOB_PREFIX
from keepstep_lighthouse.store import Write
from keepstep_lighthouse.term import EPOCH_KEY
from keepstep_mesh.messages import Evicted
from simulation.failover_faults import FAULTS, faults_of
from simulation.faults import Fault, inject
from simulation.network import Connection
from simulation.node import Node, address_of, simulated
from simulation.roaming import Roaming
from simulation.shared_store import SharedStore
from simulation.training import FAULT_SECONDS, Training, Violation
from simulation.wires import Socket
from simulation.worker import Worker

JOB_KEY = JOB_PREFIX + "job"
LEASES = (3.0, 3.0, 6.0)
RATES = (0.95, 1.05)
Script = Generator[float | Callable[[], bool], None, None]
"""Faults by hand: yields seconds to wait, or what to wait for."""
LOOK_SECONDS = 0.005
SCRIPT_SECONDS = 60.0


class Failover(Training):
    """``faults``: those of the seed, if none are given. ``rate``: of the lighthouses' clocks, else each has its own."""

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
        quiet_at: float = FAULT_SECONDS,
    ) -> None:
        random = Random(f"failover {seed}")
        groups = groups or random.randint(1, 5)
        lighthouses = lighthouses or random.choice((2, 2, 2, 3))
        policy = policy or Policy(
            min_replicas=random.choice((1, random.randint(1, groups))),
            max_replicas=random.choice((0, 0, 0, groups)),
            join_timeout=random.choice((1.0, 4.0)),
            heal_timeout=3.0,
            heartbeat_timeout=random.choice((2.5, 5.0)),
            takeover_grace=random.choice((None, None, 0.2)),
        )
        super().__init__(random, [f"r{number}" for number in range(groups)], policy, careful=careful, quiet_at=quiet_at)
        self.violation: Violation | None = None
        self.store = SharedStore(self.time, random, self._written)
        self.parted_lighthouses: set[frozenset[str]] = set()
        """Pairs of addresses."""
        self.parted_groups: set[tuple[str, str]] = set()
        """(group, address of a lighthouse)."""
        self._connected: list[tuple[str, str, Connection]] = []
        self._written_quorums: dict[int, tuple[str, ...]] = {}
        self._written_evictions: set[str] = set()
        self._last_quorum_of: dict[int, int] = {}
        """By epoch: the last quorum_id in the store while it was the epoch."""
        self._announced: tuple[int, tuple[str, ...]] = (0, ())
        """The highest quorum so far."""
        self.announced_by = ""
        """Name of the lighthouse that announced last."""
        self._numbers = itertools.count(1)
        names = "ABC"[:lighthouses]
        self._lease = dict.fromkeys(names, lease or random.choice(LEASES))
        if lease is None and random.random() < 0.2:  # in the middle of a change of --lease
            self._lease[names[0]] = random.choice(LEASES)
        self._rate = {name: rate or random.uniform(*RATES) for name in names}
        self.nodes: dict[str, Node] = {}
        """By address."""
        with simulated(self):
            for name in names:
                self._start(name)
        self.by_name = lambda name: self.nodes[address_of(name)]
        for name in self.names:
            self.time.after(0.3 * random.random(), self.launch, name)
        for fault in faults_of(seed) if faults is None else faults:
            self.time.at(fault.at, inject, self, fault, FAULTS)
        self.time.at(quiet_at, self.stop_faults)

    def run(self, script: Callable[[Failover], Script] | None = None) -> None:
        with simulated(self):
            if script is not None:
                self.time.at(0.0, self._follow, script(self), None, 0.0)
            try:
                super().run()
            finally:
                for node in self.nodes.values():
                    node.kill()
        if self.violation is not None:
            raise self.violation

    def _follow(self, script: Script, condition: Callable[[], bool] | None, since: float) -> None:
        if condition is not None and not condition():
            if self.time.now - since > SCRIPT_SECONDS:
                self.violated(f"the script waits in vain in line {script.gi_frame.f_lineno}")
            self.time.after(LOOK_SECONDS, self._follow, script, condition, since)
            return
        for wanted in script:
            if callable(wanted):
                self.time.after(0.0, self._follow, script, wanted, self.time.now)
            else:
                self.time.after(wanted, self._follow, script, None, 0.0)
            return

    def why_not(self) -> str:
        for node in self.nodes.values():
            if node.leads and (job := node.keeper.jobs.get("job")) is not None:
                return f"{node.name}: {job.core.reason(node.loop.time()).sentence}"
        return "; ".join(f"{node.name}: {node.keeper.trouble}" for node in self.nodes.values())

    # ---- what must hold

    def violated(self, what: str) -> None:
        """Remembered too: the product catches what is raised in the middle of it."""
        if self.violation is None:
            self.violation = Violation(what)
            self.note(f"VIOLATED {what}")
        self._done = True
        raise self.violation

    def fault(self, what: str) -> None:
        if self.violation is None:
            self.violation = Violation(f"a fault in a process: {what}")
            self.note(f"VIOLATED {self.violation}")
        self._done = True

    def fault_in_running_process(self, what: str) -> None:
        if not any(node.loop.dead for node in self.nodes.values() if node.loop.is_running()):
            self.fault(what)

    def _written(self, writes: Sequence[Write]) -> None:
        """In the store, just before ``writes`` are carried out."""
        for write in writes:
            if write.key == EPOCH_KEY:
                before, after = int(self.store.values.get(EPOCH_KEY, b"0")), int(write.value or b"0")
                if after <= before:
                    self.violated(f"the epoch goes back from {before} to {after}")
                self._last_quorum_of[before] = self.stored.quorum_id
            elif write.key == JOB_KEY:
                self._record_written(records.decode(JOB_KEY, write.value or b""))
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
        if len(announce.to) != len(members):
            return  # an answer that is given again
        node = self._node_of(job)
        self.rounds += 1
        self.announced_by = node.name
        self.note(f"{node.name} announces quorum {quorum_id} of {members}, step {announce.step}")
        if self._memberships.setdefault(quorum_id, members) != members:
            self.violated(f"quorum {quorum_id} is {self._memberships[quorum_id]} and {members}")
        if self._written_quorums.get(quorum_id) != members:
            self.violated(f"quorum {quorum_id} of {members} is announced and was not written")
        leadership = node.keeper.leadership
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
        self._done = self._done or (self._quiet and self._recovered())

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
        node, epoch = self._node_of(job), job.term.epoch
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
                self.violated(f"the core of {self._node_of(job).name} is inconsistent: {error}")

    def _node_of(self, job: Job) -> Node:
        return next(node for node in self.nodes.values() if node.loop is job._loop)

    @property
    def announced_quorum(self) -> int:
        """The highest so far."""
        return self._announced[0]

    def running_node(self) -> str:
        return next((node.name for node in self.nodes.values() if node.loop.is_running()), "-")

    # ---- the mesh

    def _start(self, name: str) -> None:
        self.note(f"{name} starts")
        node = Node(self, name, next(self._numbers), self._rate[name], self._lease[name])
        self.nodes[node.address] = node

    def start_lighthouse(self, name: str) -> None:
        if self.by_name(name).loop.dead:
            self._start(name)

    def connect(self, here: Any, there: Socket) -> Connection:
        self._connections += 1
        connection = Connection(self._connections, here, there, self.time, self.random)
        who = here.node.address if isinstance(here, Socket) else here.name
        self._connected = [one for one in self._connected if not one[2].over]
        self._connected.append((who, there.node.address, connection))
        return connection

    def new_worker(self, name: str, number: int) -> Worker:
        return Roaming(self, name, number)

    def dial(self, worker: Worker) -> Connection | None:
        assert isinstance(worker, Roaming)
        node = self.nodes[worker.address]
        if node.loop.dead:
            return None
        if (worker.name, node.address) in self.parted_groups:
            nowhere = Connection(0, worker, worker, self.time, self.random)
            nowhere.part()
            return nowhere if self.random.random() < 0.5 else None
        socket = Socket(node)
        connection = socket.connection = self.connect(worker, socket)
        node.loop.call_soon(lambda: node.loop.create_task(node.serve(socket)))
        return connection

    def between(self, one: str, other: str) -> list[Connection]:
        """Open connections of a group or lighthouse (its address) with a lighthouse (its address)."""
        ends = ((one, other), (other, one))
        return [connection for a, b, connection in self._connected if (a, b) in ends]

    @property
    def leader(self) -> Node | None:
        """Who leads by what the store says."""
        for node in self.nodes.values():
            core = node.keeper.leadership.core if node.keeper.leadership is not None else None
            if node.leads and core is not None and core.mine == self.store.values.get(LEADER_KEY):
                return node
        return None

    def order(self, order: Any) -> None:
        leader = self.leader
        if leader is not None and not leader.loop.asleep:
            leader.order(order)

    # ---- faults

    def kill_lighthouse(self, node: Node, seconds: float) -> None:
        """It is started anew after ``seconds``."""
        if not node.loop.dead:
            self.note(f"{node.name} is dead")
            node.kill()
            self.time.after(seconds, self.start_lighthouse, node.name)

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
        self.time.after(seconds, self.join_with_the_store, node)

    def join_with_the_store(self, node: Node) -> None:
        node.store.cut_off = False
        self._catch_up()

    def hear_again(self, node: Node) -> None:
        node.store.deaf = False
        self._catch_up()

    def bring_the_store_back(self) -> None:
        self.store.away = False
        self._catch_up()

    def _catch_up(self) -> None:
        for watch in self.store.watches:
            watch.reachable_again()

    def pairs(self) -> list[tuple[Node, Node]]:
        return list(itertools.combinations(self.nodes.values(), 2))

    def part_lighthouses(self, one: Node, other: Node, seconds: float, *, silently: bool) -> None:
        self.note(f"{one.name} and {other.name} are parted")
        pair = frozenset((one.address, other.address))
        self.parted_lighthouses.add(pair)
        connections = self.between(one.address, other.address)
        for connection in connections:
            if silently:
                connection.part()
            else:
                connection.cut()
        self.time.after(seconds, self._join_lighthouses, pair, connections)

    def _join_lighthouses(self, pair: frozenset[str], connections: list[Connection]) -> None:
        self.parted_lighthouses.discard(pair)
        for connection in connections:
            connection.rejoin()

    def part_group(self, name: str, node: Node, seconds: float) -> None:
        """Nothing arrives, neither way, and nobody is told."""
        self.note(f"{name} and {node.name} are parted")
        self.parted_groups.add((name, node.address))
        for connection in self.between(name, node.address):
            connection.part()
        self.time.after(seconds, self._join_group, name, node.address)

    def keep_away(self, name: str, node: Node, seconds: float, *, silently: bool) -> None:
        """As ``part_group``; unless ``silently`` the connections that are there end first."""
        if not silently:
            for connection in self.between(name, node.address):
                connection.cut()
            self.time.after(0.01, self.part_group, name, node, seconds)
            self.parted_groups.add((name, node.address))
        else:
            self.part_group(name, node, seconds)

    def _join_group(self, name: str, address: str) -> None:
        self.parted_groups.discard((name, address))
        for connection in self.between(name, address):
            connection.rejoin()

    # ---- the end

    def stop_faults(self) -> None:
        super().stop_faults()
        for node in self.nodes.values():
            self.time.after(8.0, self.start_lighthouse, node.name)
