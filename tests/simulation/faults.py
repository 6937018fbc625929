"""What goes wrong, when and to whom, all from the seed: with groups anywhere, and with a single lighthouse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from keepstep_lighthouse.quorum.events import DrainOrdered, EvictOrdered, Policy, PolicyOrdered, ReadmitOrdered
from tests.simulation.training import FAULT_SECONDS, Training
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.network import Connection
    from tests.simulation.simulator import Simulation

SILENT_SECONDS = 5.0
"""A worker that hears nothing from the lighthouse for so long looks for another connection."""


Act = Callable[[Any, Worker, "Fault"], None]


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    who: int
    other: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:5.2f} s: {self.kind.replace('_', ' ')} (group {self.who}, {self.seconds:g} s, {self.other})"


def faults_of(seed: int) -> tuple[Fault, ...]:
    return draw(Random(f"faults {seed}"), KINDS)


def draw(random: Random, kinds: Sequence[str]) -> tuple[Fault, ...]:
    moments = [1.0 + (FAULT_SECONDS - 1.0) * random.random() for _ in range(random.randint(1, 10))]
    if random.random() < 0.4:  # together rather than one by one
        moments = [moments[i - i % 3] + 0.1 * random.random() for i in range(len(moments))]
    return tuple(
        Fault(at, random.choice(kinds), random.randrange(5), random.randrange(5), random.choice((0.1, 0.4, 2.0, 6.0)))
        for at in sorted(moments)
    )


def inject(sim: Training, fault: Fault, acts: Mapping[str, Act] | None = None) -> None:
    sim.note(f"FAULT {fault}")
    worker = sim.latest.get(sim.names[fault.who % len(sim.names)])
    if worker is not None:
        (FAULTS if acts is None else acts)[fault.kind](sim, worker, fault)


def kill(sim: Training, worker: Worker, _: Fault) -> None:
    worker.die()
    sim.launch_later(worker.name)


def kill_and_heal_slowly(sim: Training, worker: Worker, fault: Fault) -> None:
    sim.slow_heals[worker.name] = 2.0 + fault.seconds
    kill(sim, worker, fault)


def a_rank_dies(sim: Training, worker: Worker, _: Fault) -> None:
    if worker.alive and not worker.frozen:
        worker.rank_dies()
        sim.launch_later(worker.name)


def leave(sim: Training, worker: Worker, _: Fault) -> None:
    worker.leaving = True


def freeze(sim: Training, worker: Worker, fault: Fault) -> None:
    if worker.alive and not worker.frozen:
        worker.freeze(fault.seconds)


def give_up_a_request(sim: Training, worker: Worker, _: Fault) -> None:
    if worker.alive and not worker.frozen and worker.session.open is not None:
        worker.give_up(worker.session.open)


def fail_a_step(sim: Training, worker: Worker, _: Fault) -> None:
    worker.fail_next = True


def fail_a_commit(_: Training, worker: Worker, __: Fault) -> None:
    if worker.alive and not worker.frozen:
        worker.fail_commit()


def ask_with_shrink_only(sim: Training, worker: Worker, _: Fault) -> None:
    worker.shrink_next = True


def start_twice(sim: Training, first: Worker, fault: Fault) -> None:
    """A second process under the same name; it is ended again after a while."""
    second = sim.launch(first.name)
    sim.latest[first.name] = first
    sim.time.after(fault.seconds + 1.0, _end_second, sim, first, second)


def _end_second(sim: Training, first: Worker, second: Worker) -> None:
    second.die()
    if not first.alive:
        sim.launch_later(first.name)


def kill_the_lighthouse(sim: Simulation, _: Worker, fault: Fault) -> None:
    if sim.lighthouse.alive:
        sim.lighthouse.kill()
        sim.time.after(fault.seconds, sim.start_lighthouse)


def let_the_lighthouse_sleep(sim: Simulation, _: Worker, fault: Fault) -> None:
    if sim.lighthouse.alive and not sim.lighthouse.asleep:
        sim.lighthouse.sleep(fault.seconds)


def break_the_connection(sim: Training, worker: Worker, _: Fault) -> None:
    if worker.connection is not None:
        worker.connection.cut()


def part_from_the_lighthouse(sim: Simulation, worker: Worker, fault: Fault) -> None:
    """Nothing arrives, neither way."""
    connection = worker.connection
    sim.parted_from_lighthouse.add(worker.name)
    if connection is not None:
        connection.part()
        sim.time.after(SILENT_SECONDS, _hang_up, worker, connection)
    sim.time.after(fault.seconds, _rejoin_the_lighthouse, sim, worker.name, connection)


def _hang_up(worker: Worker, connection: Connection) -> None:
    if connection.parted and worker.connection is connection and worker.alive and not worker.frozen:
        worker.hang_up()


def _rejoin_the_lighthouse(sim: Simulation, name: str, connection: Connection | None) -> None:
    sim.parted_from_lighthouse.discard(name)
    if connection is not None:
        connection.rejoin()


def part_two_groups(sim: Training, worker: Worker, fault: Fault) -> None:
    pair = frozenset((worker.name, sim.names[fault.other % len(sim.names)]))
    if len(pair) == 2:
        sim.parted_pairs.add(pair)
        sim.time.after(fault.seconds, _rejoin, sim, pair)


def _rejoin(sim: Training, pair: frozenset[str]) -> None:
    sim.parted_pairs.discard(pair)
    waiting, sim.waiting = sim.waiting, []
    for collective in waiting:
        sim.try_complete(collective)


def drain(sim: Training, worker: Worker, _: Fault) -> None:
    sim.order(DrainOrdered(worker.name, "maintenance", "ann"))


def evict(sim: Training, worker: Worker, _: Fault) -> None:
    sim.order(EvictOrdered(worker.name, "bad disk", 0.0, "ann"))


def ban(sim: Training, worker: Worker, fault: Fault) -> None:
    sim.order(EvictOrdered(worker.name, "bad disk", 2 * fault.seconds, "ann"))
    sim.time.after(fault.seconds, sim.order, ReadmitOrdered(worker.name, "ann"))


def change_the_policy(sim: Training, _: Worker, fault: Fault) -> None:
    minimum = 1 + fault.other % len(sim.names)
    old = sim.policy
    sim.order(PolicyOrdered(Policy(minimum, old.max_replicas, old.join_timeout, old.heal_timeout), "ann"))


GROUP_WEIGHTS: dict[Act, int] = {
    kill: 4,
    kill_and_heal_slowly: 1,
    a_rank_dies: 1,
    leave: 1,
    freeze: 2,
    give_up_a_request: 2,
    fail_a_step: 2,
    fail_a_commit: 2,
    ask_with_shrink_only: 1,
    start_twice: 1,
    break_the_connection: 4,
    part_two_groups: 2,
    drain: 1,
    evict: 1,
    ban: 1,
    change_the_policy: 1,
}
WEIGHTS: dict[Act, int] = {
    **GROUP_WEIGHTS,
    kill_the_lighthouse: 4,
    let_the_lighthouse_sleep: 1,
    part_from_the_lighthouse: 2,
}
FAULTS = {act.__name__: act for act in WEIGHTS}
KINDS = [act.__name__ for act, weight in WEIGHTS.items() for _ in range(weight)]
