"""The ports of groups in virtual time: this replaces ``PortProbes`` under the real jobs.

A group listens until it is dead, and a moment longer than its connections last. A frozen group accepts connections and
answers nothing. Something between the lighthouses and some groups refuses all new connections to these groups, from
their start on (the groups live and never answer) or from a later moment on (the proof misleads once).
"""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.port_probes import FIND_PAUSES, PROBE_PAUSES, Report
from keepstep_lighthouse.quorum.events import FindPort, LogEntry, PortAnswered, PortRefused, ProbePort

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.simulation.actors.node import Node
    from tests.simulation.actors.worker import Worker

LINGERS = 0.03
"""Longest time from the end of the connections of a dying process to the end of its port, in seconds."""


class Network:
    """Answers of the ports of groups, and the check of the proofs.

    Args:
        seed: Of the simulation.
        names: Of the groups.
        violated: Called with a sentence when a rule is broken.
    """

    def __init__(self, seed: int, names: Iterable[str], violated: Callable[[str], None]) -> None:
        self.random = Random(f"ports {seed}")
        self.refuses_from = {
            name: self.random.choice((0.0, self.random.uniform(1.0, 12.0)))
            for name in names
            if self.random.random() < 0.4
        }
        """By name: the second from which something refuses connections to the group. 0: from its start on."""
        self.proofs = 0
        """Groups that were lost because their port was closed."""
        self._violated = violated
        self._misled: set[Job] = set()

    def refuses(self, worker: Worker, now: float) -> bool:
        from_second = self.refuses_from.get(worker.name)
        return (not worker.alive and now > worker.died_at + worker.port_lingers) or (
            from_second is not None and now >= from_second
        )

    def check(self, job: Job, entry: LogEntry, worker: Worker) -> None:
        """Check that a living group is lost by its port at most once for each job of a leader."""
        if entry.kind == "port_misled":
            self._misled.add(job)
        if entry.kind != "lost" or "port is closed" not in str(entry.detail["reason"]):
            return
        self.proofs += 1
        if worker.alive and (job in self._misled or not self.refuses_from.get(worker.name)):
            self._violated(f"{worker.replica_id} lives, and the lighthouse lost it because of its port")


class Ports:
    """Carry out ``FindPort`` and ``ProbePort`` for the lighthouse ``node``. Without a ``network`` nothing is found."""

    def __init__(self, node: Node, network: Network | None) -> None:
        self._node, self._network = node, network
        self._sim = node.sim

    def find(self, wanted: FindPort, report: Report) -> None:
        if self._network is not None:
            for pause in accumulate(FIND_PAUSES):
                self._after(pause, self._ask, self._network, wanted, report)

    def probe(self, wanted: ProbePort, report: Report) -> None:
        if self._network is not None:
            for pause in accumulate(PROBE_PAUSES):
                if pause < wanted.seconds:
                    self._after(pause, self._connect, self._network, wanted, report)

    def _after(self, pause: float, act: Callable[..., None], network: Network, *args: object) -> None:
        self._sim.time.after(pause + 0.0005 + 0.004 * network.random.random(), act, network, *args)

    def _ask(self, network: Network, wanted: FindPort, report: Report) -> None:
        worker = self._reached(wanted)
        if worker is not None and worker.runs and not network.refuses(worker, self._sim.time.now):
            self._node.loop.deliver(report, PortAnswered(wanted.session))

    def _connect(self, network: Network, wanted: ProbePort, report: Report) -> None:
        worker = self._reached(wanted)
        if worker is not None and network.refuses(worker, self._sim.time.now):
            self._node.loop.deliver(report, PortRefused(wanted.session, wanted.replica_id))

    def _reached(self, wanted: FindPort | ProbePort) -> Worker | None:
        if self._node.loop.dead or self._sim.mesh.is_partitioned(wanted.host, self._node.address):
            return None
        return self._sim.workers.get(f"{wanted.host}:{wanted.port}")
