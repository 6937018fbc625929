"""Collectives of the ranks of a quorum, in which each brings a value and gets those of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.actors.collectives import NOTICED

if TYPE_CHECKING:
    from tests.simulation.actors.trainer import Trainer
    from tests.simulation.simulation import Simulation

Joined = tuple["Trainer", Any, int, Callable[[list[Any]], None]]


class Gathering:
    def __init__(self, size: int, facts: Any) -> None:
        self.size, self.facts = size, facts
        self.joined: list[Joined] = []
        self.ended = False


class Gatherings:
    """Those of all quorums. One completes when every rank has joined, and may still fail for some of them."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._open: dict[tuple[int, str], Gathering] = {}
        self._broken: set[int] = set()
        """Quorums of which a rank has died or given up."""

    def join(
        self,
        trainer: Trainer,
        key: tuple[int, str],
        value: Any,
        facts: Any,
        run: int,
        then: Callable[[list[Any]], None],
    ) -> None:
        size = len(self._sim.quorums.memberships[key[0]]) * trainer.shards.ranks
        gathering = self._open.setdefault(key, Gathering(size, facts))
        if gathering.facts != facts:
            self._sim.violated(f"a rank brings {facts} to {key}, another one {gathering.facts}")
        gathering.joined.append((trainer, value, run, then))
        if key[0] in self._broken:
            self._fail(gathering.joined[-1])
        elif len(gathering.joined) == size:
            self._complete(key, gathering)

    def _complete(self, key: tuple[int, str], gathering: Gathering) -> None:
        names = {one[0].member.name for one in gathering.joined}
        if any(self._sim.mesh.is_partitioned(a, b) for a in names for b in names if a < b):
            if key[0] not in self._broken:
                self._sim.time.after(0.05, self._complete, key, gathering)
            return
        gathering.ended = True
        random = self._sim.random
        for one in gathering.joined:
            self._sim.time.after(0.001 + 0.01 * random.random(), self._finish, key, gathering, one)

    def _finish(self, key: tuple[int, str], gathering: Gathering, one: Joined) -> None:
        trainer, _, run, then = one
        if key[0] in self._broken and self._sim.random.random() < 0.5:
            self._fail(one)
        else:
            trainer.member.act(trainer.gathered, (run, then, [value for _, value, _, _ in gathering.joined]))

    def _fail(self, one: Joined) -> None:
        trainer, _, run, then = one
        if self._sim.random.random() < NOTICED:
            delay = 0.01 * self._sim.random.random()
            self._sim.time.after(delay, trainer.member.act, trainer.gathered, (run, then, None))

    def breaks(self, quorum_id: int) -> None:
        """A rank of the quorum dies, or gives up: the sockets of some others report it."""
        if quorum_id in self._broken:
            return
        self._broken.add(quorum_id)
        for key, gathering in self._open.items():
            if key[0] == quorum_id and not gathering.ended:
                for one in gathering.joined:
                    self._fail(one)
