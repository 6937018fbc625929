"""Faults of lighthouses, of their store, and of the network between them and the groups."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.actors.node import Node
    from tests.simulation.actors.worker import Worker
    from tests.simulation.faults.drawing import Act, Fault
    from tests.simulation.simulation import Simulation


def chosen(sim: Simulation, fault: Fault) -> Node:
    """The leader every other time."""
    nodes = list(sim.nodes.values())
    return (sim.leader if fault.who % 2 else None) or nodes[fault.other % len(nodes)]


# ---- lighthouses


def kill_a_lighthouse(sim: Simulation, _: Worker, fault: Fault) -> None:
    sim.kill_lighthouse(chosen(sim, fault), fault.seconds)


def kill_all_lighthouses(sim: Simulation, _: Worker, fault: Fault) -> None:
    for node in list(sim.nodes.values()):
        sim.kill_lighthouse(node, fault.seconds * sim.random.random())


def pause_a_lighthouse(sim: Simulation, _: Worker, fault: Fault) -> None:
    sim.pause(chosen(sim, fault), fault.seconds)


# ---- the store


def cut_a_lighthouse_from_the_store(sim: Simulation, _: Worker, fault: Fault) -> None:
    sim.cut_from_the_store(chosen(sim, fault), fault.seconds)


def take_the_store_away(sim: Simulation, _: Worker, fault: Fault) -> None:
    sim.store.away = True
    sim.time.after(fault.seconds, sim.bring_the_store_back)


def slow_the_store(sim: Simulation, _: Worker, fault: Fault) -> None:
    sim.store.slow = True
    sim.time.after(fault.seconds, setattr, sim.store, "slow", False)


def make_the_store_unsure(sim: Simulation, _: Worker, fault: Fault) -> None:
    sim.store.unsure = True
    sim.time.after(fault.seconds, setattr, sim.store, "unsure", False)


def lose_the_next_write(sim: Simulation, _: Worker, fault: Fault) -> None:
    """Leave a lighthouse without the outcome of its next write: it does not happen, it does, or it happens later."""
    chosen(sim, fault).store.fates["transact"] = ("lost", "done", "late", "done", "late")[fault.other]


def lose_a_call_about_a_lease(sim: Simulation, _: Worker, fault: Fault) -> None:
    call = ("grant", "keep_alive", "revoke")[fault.other % 3]
    for node in sim.nodes.values():
        node.store.fates[call] = sim.random.choice(("lost", "done", "late", "slow", "hangs"))


def deafen_a_lighthouse(sim: Simulation, _: Worker, fault: Fault) -> None:
    sim.deafen(chosen(sim, fault), fault.seconds)


def delay_the_watches(sim: Simulation, _: Worker, fault: Fault) -> None:
    sim.store.watches_are_late = True
    sim.time.after(fault.seconds, setattr, sim.store, "watches_are_late", False)


def break_the_watches(sim: Simulation, _: Worker, __: Fault) -> None:
    for watch in sim.store.watches:
        watch.breaks()


# ---- the network


def break_some_connections(sim: Simulation, _: Worker, __: Fault) -> None:
    for worker in sim.latest.values():
        if worker.session.connection is not None and sim.random.random() < 0.5:
            worker.session.connection.cut()


def partition_a_group(sim: Simulation, worker: Worker, fault: Fault) -> None:
    sim.mesh.partition(worker.name, chosen(sim, fault).address, fault.seconds)


def partition_some_groups(sim: Simulation, _: Worker, fault: Fault) -> None:
    node = chosen(sim, fault)
    for name in sim.names:
        if sim.random.random() < 0.6:
            sim.mesh.partition(name, node.address, fault.seconds)


def break_the_links_of_lighthouses(sim: Simulation, _: Worker, fault: Fault) -> None:
    for one, other in combinations(sim.nodes, 2):
        sim.mesh.partition(one, other, fault.seconds, silently=False)


def partition_the_lighthouses(sim: Simulation, _: Worker, fault: Fault) -> None:
    for one, other in combinations(sim.nodes, 2):
        sim.mesh.partition(one, other, fault.seconds)


def isolate_a_lighthouse(sim: Simulation, _: Worker, fault: Fault) -> None:
    """Separate a lighthouse from the store and the other lighthouses, but not from the groups."""
    node = chosen(sim, fault)
    sim.cut_from_the_store(node, fault.seconds)
    for other in sim.nodes:
        if other != node.address:
            sim.mesh.partition(node.address, other, fault.seconds, silently=bool(fault.other % 2))


def split_the_mesh(sim: Simulation, _: Worker, fault: Fault) -> None:
    """Separate the leader and some groups from all others. The groups notice first, the lighthouses later."""
    leader = sim.leader
    if leader is not None:
        inside = {name for name in sim.names if sim.random.random() < 0.5}
        first = sim.random.choice((0.0, 0.5, 3.0, 7.0))
        for name in sim.names:
            for address in sim.nodes:
                if (address == leader.address) != (name in inside):
                    separate = sim.mesh.partition if fault.other % 2 else sim.mesh.break_then_partition
                    separate(name, address, first + fault.seconds)
        sim.time.after(first, _separate_from_all, sim, leader, fault.seconds)


def _separate_from_all(sim: Simulation, leader: Node, seconds: float) -> None:
    sim.cut_from_the_store(leader, seconds)
    for address in sim.nodes:
        if address != leader.address:
            sim.mesh.partition(leader.address, address, seconds, silently=sim.random.random() < 0.3)


def depose_unnoticed(sim: Simulation, _: Worker, fault: Fault) -> None:
    """Depose the leader, which is not notified and keeps its lease."""
    leader = sim.leader
    if leader is not None:
        sim.deafen(leader, fault.seconds)
        for node in sim.nodes.values():
            if node is not leader:
                node.store.fates["revoke"] = "lost"
                sim.mesh.partition(leader.address, node.address, fault.seconds, silently=False)


WEIGHTS: dict[Act, int] = {
    kill_a_lighthouse: 5,
    pause_a_lighthouse: 1,
    take_the_store_away: 1,
    slow_the_store: 1,
    make_the_store_unsure: 1,
    lose_the_next_write: 2,
    partition_a_group: 2,
    partition_some_groups: 1,
    break_some_connections: 1,
}
"""How often each is drawn."""
STANDBY_WEIGHTS: dict[Act, int] = {
    pause_a_lighthouse: 4,
    make_the_store_unsure: 2,
    lose_the_next_write: 3,
    partition_some_groups: 2,
    kill_all_lighthouses: 1,
    cut_a_lighthouse_from_the_store: 3,
    lose_a_call_about_a_lease: 2,
    deafen_a_lighthouse: 2,
    delay_the_watches: 1,
    break_the_watches: 1,
    break_the_links_of_lighthouses: 4,
    partition_the_lighthouses: 2,
    isolate_a_lighthouse: 2,
    split_the_mesh: 5,
    depose_unnoticed: 2,
}
"""The same with several lighthouses: faults that hit them harder, and faults that need them or a shared store."""
