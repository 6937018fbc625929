"""All-reduces between groups, on a network of their own whose pairs of hosts can be partitioned."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from keepstep.group.quorum_plan import QuorumPlan
from keepstep_mesh.protocol.membership import Lineage
from tests.simulation.virtual.network import Timeline

if TYPE_CHECKING:
    from tests.simulation.actors.worker import Worker

TIMEOUT_SECONDS = 30.0
"""Of a collective. Longer than any fault: it ends only steps whose group learned of no loss."""
NOTICED = 0.7
"""How often the sockets of a member report that another member is gone."""


class Collective:
    """One all-reduce of the members of one quorum. Complete when every member has contributed."""

    def __init__(self, members: tuple[str, ...], facts: tuple[int, Lineage, bool]) -> None:
        self.members = members
        self.facts = facts
        self.parts: dict[str, tuple[Worker, int | None]] = {}
        self.failed = False

    def result(self) -> int:
        return hash(tuple(sorted((who, part) for who, (_, part) in self.parts.items() if part is not None)))


class Collectives:
    """The collectives of all quorums. ``violated`` is called when members of a quorum disagree about a step."""

    def __init__(self, time: Timeline, random: Random, violated: Callable[[str], None]) -> None:
        self._time, self._random, self._violated = time, random, violated
        self._partitioned: set[frozenset[str]] = set()
        self._waiting: list[Collective] = []
        self._collectives: dict[tuple[int, int], Collective] = {}

    def begin(self, key: tuple[int, int], plan: QuorumPlan, worker: Worker) -> Collective:
        """The collective ``key``: a quorum_id, and the number of collectives that were done in its process group."""
        facts = (plan.max_step, plan.lineage, plan.allow_heal)
        collective = self._collectives.get(key)
        if collective is None:
            collective = self._collectives[key] = Collective(plan.replica_ids, facts)
        if collective.facts != facts:
            self._violated(
                f"{worker.replica_id} reduces step {facts}, the others of quorum {key[0]} {collective.facts}"
            )
        return collective

    def contribute(self, collective: Collective, worker: Worker, part: int | None) -> None:
        """``part`` None: zeros that do not count in the divisor."""
        collective.parts[worker.replica_id] = (worker, part)
        if collective.failed:
            self._fail(collective, worker)
        else:
            self._try_complete(collective)

    def _try_complete(self, collective: Collective) -> None:
        if collective.failed or len(collective.parts) < len(collective.members):
            return
        workers = [worker for worker, _ in collective.parts.values()]
        if self._partitioned and any(self.is_partitioned(a.name, b.name) for a in workers for b in workers):
            self._waiting.append(collective)
            return
        result = collective.result()
        for worker in workers:
            self._time.after(0.001 + 0.01 * self._random.random(), self._finish, collective, worker, result)

    def _finish(self, collective: Collective, worker: Worker, result: int) -> None:
        """Deliver the result, unless a member was lost at the last moment."""
        if not collective.failed or self._random.random() < 0.5:
            worker.on_reduced(collective, result)
        else:
            self._fail(collective, worker)

    def abandon(self, collective: Collective, worker: Worker) -> None:
        """``worker`` dies or aborts. The sockets of some other members fail, those of others report nothing."""
        if not collective.failed:
            collective.failed = True
            for other, _ in collective.parts.values():
                if other is not worker:
                    self._fail(collective, other)

    def _fail(self, collective: Collective, worker: Worker) -> None:
        if self._random.random() < NOTICED:
            self._time.after(0.01 * self._random.random(), worker.on_reduced, collective, None)

    # ---- partitions

    def is_partitioned(self, one: str, other: str) -> bool:
        return bool(self._partitioned) and frozenset((one, other)) in self._partitioned

    def partition(self, one: str, other: str, seconds: float) -> None:
        pair = frozenset((one, other))
        self._partitioned.add(pair)
        self._time.after(seconds, self._rejoin, pair)

    def _rejoin(self, pair: frozenset[str]) -> None:
        self._partitioned.discard(pair)
        waiting, self._waiting = self._waiting, []
        for collective in waiting:
            self._try_complete(collective)
