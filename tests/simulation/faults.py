"""What goes wrong in a simulation, when and to whom: all from the seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from keepstep_lighthouse.events import DrainOrdered, EvictOrdered, Policy, PolicyOrdered, ReadmitOrdered

if TYPE_CHECKING:
    from simulation.network import Connection
    from simulation.simulator import Simulation
    from simulation.worker import Worker

FAULT_SECONDS = 12.0
SILENT_SECONDS = 5.0
"""A worker that hears nothing from the lighthouse for so long looks for another connection."""


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
    random = Random(f"faults {seed}")
    moments = [1.0 + (FAULT_SECONDS - 1.0) * random.random() for _ in range(random.randint(1, 10))]
    if random.random() < 0.4:  # together rather than one by one
        moments = [moments[i - i % 3] + 0.1 * random.random() for i in range(len(moments))]
    return tuple(
        Fault(at, random.choice(KINDS), random.randrange(5), random.randrange(5), random.choice((0.1, 0.4, 2.0, 6.0)))
        for at in sorted(moments)
    )


def inject(sim: Simulation, fault: Fault) -> None:
    sim.note(f"FAULT {fault}")
    worker = sim.latest.get(sim.names[fault.who % len(sim.names)])
    if worker is not None:
        FAULTS[fault.kind](sim, worker, fault)


def kill(sim: Simulation, worker: Worker, _: Fault) -> None:
    worker.die()
    sim.launch_later(worker.name)


def kill_and_heal_slowly(sim: Simulation, worker: Worker, fault: Fault) -> None:
    sim.slow_heals[worker.name] = 2.0 + fault.seconds
    kill(sim, worker, fault)


def a_rank_dies(sim: Simulation, worker: Worker, _: Fault) -> None:
    if worker.alive and not worker.frozen:
        worker.rank_dies()
        sim.launch_later(worker.name)


def leave(sim: Simulation, worker: Worker, _: Fault) -> None:
    worker.leaving = True


def freeze(sim: Simulation, worker: Worker, fault: Fault) -> None:
    if worker.alive and not worker.frozen:
        worker.freeze(fault.seconds)


def give_up_a_request(sim: Simulation, worker: Worker, _: Fault) -> None:
    if worker.alive and not worker.frozen and worker.session.open is not None:
        worker.give_up(worker.session.open)


def fail_a_step(sim: Simulation, worker: Worker, _: Fault) -> None:
    worker.fail_next = True


def ask_with_shrink_only(sim: Simulation, worker: Worker, _: Fault) -> None:
    worker.shrink_next = True


def start_twice(sim: Simulation, first: Worker, fault: Fault) -> None:
    """A second process under the same name; it is ended again after a while."""
    second = sim.launch(first.name)
    sim.latest[first.name] = first
    sim.time.after(fault.seconds + 1.0, _end_second, sim, first, second)


def _end_second(sim: Simulation, first: Worker, second: Worker) -> None:
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


def break_the_connection(sim: Simulation, worker: Worker, _: Fault) -> None:
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


def part_two_groups(sim: Simulation, worker: Worker, fault: Fault) -> None:
    pair = frozenset((worker.name, sim.names[fault.other % len(sim.names)]))
    if len(pair) == 2:
        sim.parted_pairs.add(pair)
        sim.time.after(fault.seconds, _rejoin, sim, pair)


def _rejoin(sim: Simulation, pair: frozenset[str]) -> None:
    sim.parted_pairs.discard(pair)
    waiting, sim.waiting = sim.waiting, []
    for collective in waiting:
        sim.try_complete(collective)


def drain(sim: Simulation, worker: Worker, _: Fault) -> None:
    _order(sim, DrainOrdered(worker.name, "maintenance", "ann"))


def evict(sim: Simulation, worker: Worker, _: Fault) -> None:
    _order(sim, EvictOrdered(worker.name, "bad disk", 0.0, "ann"))


def ban(sim: Simulation, worker: Worker, fault: Fault) -> None:
    _order(sim, EvictOrdered(worker.name, "bad disk", 2 * fault.seconds, "ann"))
    sim.time.after(fault.seconds, _order, sim, ReadmitOrdered(worker.name, "ann"))


def change_the_policy(sim: Simulation, _: Worker, fault: Fault) -> None:
    minimum = 1 + fault.other % len(sim.names)
    old = sim.policy
    _order(sim, PolicyOrdered(Policy(minimum, old.max_replicas, old.join_timeout, old.heal_timeout), "ann"))


def _order(sim: Simulation, order: Any) -> None:
    if sim.lighthouse.alive and not sim.lighthouse.asleep:
        sim.lighthouse.handle(order)


WEIGHTS: dict[Callable[[Simulation, Worker, Fault], None], int] = {
    kill: 4,
    kill_and_heal_slowly: 1,
    a_rank_dies: 1,
    leave: 1,
    freeze: 2,
    give_up_a_request: 2,
    fail_a_step: 2,
    ask_with_shrink_only: 1,
    start_twice: 1,
    kill_the_lighthouse: 4,
    let_the_lighthouse_sleep: 1,
    break_the_connection: 4,
    part_from_the_lighthouse: 2,
    part_two_groups: 2,
    drain: 1,
    evict: 1,
    ban: 1,
    change_the_policy: 1,
}
FAULTS = {act.__name__: act for act in WEIGHTS}
KINDS = [act.__name__ for act, weight in WEIGHTS.items() for _ in range(weight)]
