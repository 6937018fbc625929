"""Faults of groups and of the network between them, and orders of an administrator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepstep_lighthouse.quorum.events import DrainOrdered, EvictOrdered, PolicyOrdered, ReadmitOrdered, ReplaceOrdered
from keepstep_mesh.protocol.policy import Policy

if TYPE_CHECKING:
    from tests.simulation.actors.troubles import Trouble
    from tests.simulation.actors.worker import Worker
    from tests.simulation.faults.drawing import Act, Fault
    from tests.simulation.simulation import Simulation


# ---- processes


def kill(sim: Simulation, worker: Worker, _: Fault) -> None:
    worker.die()
    sim.launch_later(worker.name)


def kill_and_heal_slowly(sim: Simulation, worker: Worker, fault: Fault) -> None:
    sim.slow_heals[worker.name] = 2.0 + fault.seconds
    kill(sim, worker, fault)


def lose_a_rank(sim: Simulation, worker: Worker, _: Fault) -> None:
    if worker.runs:
        worker.lose_a_rank()
        sim.launch_later(worker.name)


def leave(_: Simulation, worker: Worker, __: Fault) -> None:
    worker.leaving = True


def freeze(_: Simulation, worker: Worker, fault: Fault) -> None:
    if worker.runs:
        worker.freeze(fault.seconds)


def start_twice(sim: Simulation, first: Worker, fault: Fault) -> None:
    """Start a second process of the same name, and kill it after a while."""
    second = sim.launch(first.name)
    sim.latest[first.name] = first
    sim.time.after(fault.seconds + 1.0, _end_second, sim, first, second)


def _end_second(sim: Simulation, first: Worker, second: Worker) -> None:
    second.die()
    if not first.alive:
        sim.launch_later(first.name)


def resume_a_group(sim: Simulation, worker: Worker, fault: Fault) -> None:
    """Start one group again from an older checkpoint. The others go on: it has to heal."""
    _resume(sim, [worker], fault)


def resume_the_job(sim: Simulation, worker: Worker, fault: Fault) -> None:
    """Start the groups again from one older checkpoint, all or all but one, which is frozen and comes back."""
    workers = list(sim.latest.values())
    if fault.who % 2 and worker.runs:
        worker.freeze(fault.seconds)
        workers.remove(worker)
    _resume(sim, workers, fault)


def _resume(sim: Simulation, workers: list[Worker], fault: Fault) -> None:
    if sim.checkpoints:
        checkpoint = sim.checkpoints[len(sim.checkpoints) * fault.other // 5]
        for worker in workers:
            sim.resume_from[worker.name] = checkpoint
            kill(sim, worker, fault)


# ---- steps


def cancel_a_request(_: Simulation, worker: Worker, __: Fault) -> None:
    if worker.runs and worker.session.core.open is not None:
        worker.cancel(worker.session.core.number)


def fail_a_step(_: Simulation, worker: Worker, __: Fault) -> None:
    worker.refuse_next()


def fail_a_commit(_: Simulation, worker: Worker, __: Fault) -> None:
    if worker.runs:
        worker.fail_commit()


def ask_with_shrink_only(_: Simulation, worker: Worker, __: Fault) -> None:
    worker.shrink_next = True


# ---- memory and time


def fill_the_memory(sim: Simulation, worker: Any, fault: Fault) -> None:
    """Leave a member no memory for the copies of others for a while."""
    worker.full = True
    sim.time.after(2 * fault.seconds, setattr, worker, "full", False)


def hang(sim: Simulation, worker: Any, fault: Fault) -> None:
    """Let a member and the next one ask for no quorum for a while."""
    after = sim.latest[sim.names[(sim.names.index(worker.name) + fault.other % 2) % len(sim.names)]]
    for one in (worker, after):
        one.hangs_until = sim.time.now + 2 * fault.seconds


# ---- training threads


def hang_for_ever(_: Simulation, worker: Worker, fault: Fault) -> None:
    worker.thread.begins("hangs", fault.seconds)


def work_on(_: Simulation, worker: Worker, fault: Fault) -> None:
    """Take long, and longer than the limit of a hang, in a stack that changes."""
    worker.thread.begins("works", 2 * fault.seconds)


def read_on(_: Simulation, worker: Worker, fault: Fault) -> None:
    worker.thread.begins("reads", 2 * fault.seconds)


def evaluate(_: Simulation, worker: Worker, fault: Fault) -> None:
    worker.thread.begins("evaluates", 2 * fault.seconds)


# ---- the network


def break_the_connection(_: Simulation, worker: Worker, __: Fault) -> None:
    if worker.session.connection is not None:
        worker.session.connection.cut()


def partition_two_groups(sim: Simulation, worker: Worker, fault: Fault) -> None:
    other = sim.names[fault.other % len(sim.names)]
    if other != worker.name:
        sim.collectives.partition(worker.name, other, fault.seconds)
        sim.mesh.partition(worker.name, other, fault.seconds)


# ---- orders


def drain(sim: Simulation, worker: Worker, _: Fault) -> None:
    sim.order(DrainOrdered(worker.name, "maintenance", "ann"))


def replace_a_group(sim: Simulation, worker: Worker, _: Fault) -> None:
    sim.order(ReplaceOrdered(worker.name, "bad fan", "ann"))


def give_notice(_: Simulation, worker: Worker, fault: Fault) -> None:
    if worker.runs:
        worker.get_notice(2 * fault.seconds)


def evict(sim: Simulation, worker: Worker, _: Fault) -> None:
    sim.order(EvictOrdered(worker.name, "bad disk", 0.0, "ann"))


def ban(sim: Simulation, worker: Worker, fault: Fault) -> None:
    sim.order(EvictOrdered(worker.name, "bad disk", 2 * fault.seconds, "ann"))
    sim.time.after(fault.seconds, sim.order, ReadmitOrdered(worker.name, "ann"))


def change_the_policy(sim: Simulation, _: Worker, fault: Fault) -> None:
    minimum = 1 + fault.other % len(sim.names)
    if sim.shards is not None:
        minimum = sim.shards.fitting(minimum)
    old = sim.policy
    sim.order(
        PolicyOrdered(
            Policy(
                minimum,
                old.max_replicas,
                join_timeout=old.join_timeout,
                heal_timeout=old.heal_timeout,
                hang_after=old.hang_after,
            ),
            "ann",
        )
    )


# ---- troubles


def fail_every_step(sim: Simulation, worker: Worker, fault: Fault) -> None:
    _trouble(sim, worker, fault, "fails")


def lie(sim: Simulation, worker: Worker, fault: Fault) -> None:
    _trouble(sim, worker, fault, "lies")


def heal_in_vain(sim: Simulation, worker: Worker, fault: Fault) -> None:
    _trouble(sim, worker, fault, "heals in vain")
    kill(sim, worker, fault)


def _trouble(sim: Simulation, worker: Worker, fault: Fault, trouble: Trouble) -> None:
    if sim.troubles is not None:
        sim.troubles.begin(worker.name, trouble)
        sim.time.after(2 * fault.seconds, sim.troubles.end, worker.name)


WEIGHTS: dict[Act, int] = {
    kill: 4,
    kill_and_heal_slowly: 1,
    lose_a_rank: 1,
    leave: 1,
    freeze: 2,
    cancel_a_request: 2,
    fail_a_step: 2,
    fail_a_commit: 2,
    ask_with_shrink_only: 1,
    start_twice: 1,
    resume_a_group: 1,
    resume_the_job: 3,
    break_the_connection: 4,
    partition_two_groups: 2,
    drain: 1,
    evict: 1,
    ban: 1,
    change_the_policy: 1,
}
"""How often each is drawn."""
ONE_COPY_WEIGHTS: dict[Act, int] = {fill_the_memory: 2, hang: 3, freeze: 3, leave: 2}
"""The same where the model exists once."""
OF_FULL_COPIES = (kill_and_heal_slowly, resume_a_group, resume_the_job, fail_a_commit, ask_with_shrink_only)
"""Faults that a group has only if it holds a full copy of the model."""
REPLACING = (replace_a_group, give_notice)
"""Faults of jobs with spares."""
TROUBLE_WEIGHTS: dict[Act, int] = {
    fail_every_step: 6,
    lie: 3,
    heal_in_vain: 3,
    partition_two_groups: 10,
}
"""The same where groups keep others from committing."""
HANG_WEIGHTS: dict[Act, int] = {hang_for_ever: 8, work_on: 4, read_on: 3, evaluate: 3, freeze: 4}
"""The same where training threads hang, or are slow."""
