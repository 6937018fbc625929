"""Lighthouses that stand by for each other, their store, and groups that train with them: all that can be hurt.

``Mesh`` runs it and hurts it; what must hold of it says ``failover``.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any

from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.leadership.campaign import LEADER_KEY
from keepstep_lighthouse.quorum.events import Announce, Policy, Tell
from keepstep_lighthouse.store.contract import Write
from tests.simulation.network import Connection
from tests.simulation.node import Node, address_of, simulated
from tests.simulation.roaming import Roaming
from tests.simulation.shared_store import SharedStore
from tests.simulation.training import FAULT_SECONDS, Training, Violation
from tests.simulation.wires import Socket
from tests.simulation.worker import Worker

LEASES = (3.0, 3.0, 6.0)
RATES = (0.95, 1.05)


class Mesh(Training):
    """``rate``: of the lighthouses' clocks, else each has its own. What is not given comes from the seed."""

    def __init__(
        self,
        seed: int,
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
            initial_replicas=random.choice((0, groups)),
            join_timeout=random.choice((1.0, 4.0)),
            heal_timeout=3.0,
            heartbeat_timeout=random.choice((2.5, 5.0)),
            takeover_grace=random.choice((None, None, 0.2)),
            verify_every=1,
        )
        super().__init__(random, [f"r{number}" for number in range(groups)], policy, careful=careful, quiet_at=quiet_at)
        self.violation: Violation | None = None
        self.store = SharedStore(self.time, random, self.written)
        self.parted_lighthouses: set[frozenset[str]] = set()
        """Pairs of addresses."""
        self.parted_groups: set[tuple[str, str]] = set()
        """(group, address of a lighthouse)."""
        self._connected: list[tuple[str, str, Connection]] = []
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
        self.time.at(quiet_at, self.stop_faults)

    def run(self) -> None:
        with simulated(self):
            try:
                super().run()
            finally:
                for node in self.nodes.values():
                    node.kill()
        if self.violation is not None:
            raise self.violation

    def why_not(self) -> str:
        for node in self.nodes.values():
            if node.leads and (job := node.lighthouse.jobs.get("job")) is not None:
                return f"{node.name}: {job.core.reason(node.loop.time()).sentence}"
        return "; ".join(f"{node.name}: {node.lighthouse.trouble}" for node in self.nodes.values())

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

    # ---- what the simulation is shown

    @abstractmethod
    def written(self, writes: Sequence[Write]) -> None:
        """In the store, just before ``writes`` are carried out."""

    @abstractmethod
    def announced(self, job: Job, announce: Announce) -> None: ...

    @abstractmethod
    def told(self, job: Job, tell: Tell) -> None: ...

    @abstractmethod
    def checked(self, job: Job) -> None:
        """``job`` has handled an event."""

    # ---- the lighthouses, and who comes to them

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
            core = node.lighthouse.leadership.core if node.lighthouse.leadership is not None else None
            if node.leads and core is not None and core.mine == self.store.values.get(LEADER_KEY):
                return node
        return None

    def order(self, order: Any) -> None:
        leader = self.leader
        if leader is not None and not leader.loop.asleep:
            leader.order(order)

    def node_of(self, job: Job) -> Node:
        return next(node for node in self.nodes.values() if node.loop is job._loop)

    def running_node(self) -> str:
        return next((node.name for node in self.nodes.values() if node.loop.is_running()), "-")

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
