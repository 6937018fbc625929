"""What goes wrong where lighthouses stand by for each other: with them, their store, and all links between."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.simulation.faults import GROUP_WEIGHTS, Act, Fault, draw
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.mesh import Mesh
    from tests.simulation.node import Node


def faults_of(seed: int) -> tuple[Fault, ...]:
    return draw(Random(f"failover faults {seed}"), KINDS)


def chosen(sim: Mesh, fault: Fault) -> Node:
    """The leader every other time."""
    nodes = list(sim.nodes.values())
    return (sim.leader if fault.who % 2 else None) or nodes[fault.other % len(nodes)]


# ---- lighthouses


def kill_a_lighthouse(sim: Mesh, _: Worker, fault: Fault) -> None:
    sim.kill_lighthouse(chosen(sim, fault), fault.seconds)


def kill_all_lighthouses(sim: Mesh, _: Worker, fault: Fault) -> None:
    for node in list(sim.nodes.values()):
        sim.kill_lighthouse(node, fault.seconds * sim.random.random())


def pause_a_lighthouse(sim: Mesh, _: Worker, fault: Fault) -> None:
    sim.pause(chosen(sim, fault), fault.seconds)


# ---- the store


def cut_a_lighthouse_from_the_store(sim: Mesh, _: Worker, fault: Fault) -> None:
    sim.cut_from_the_store(chosen(sim, fault), fault.seconds)


def take_the_store_away(sim: Mesh, _: Worker, fault: Fault) -> None:
    sim.store.away = True
    sim.time.after(fault.seconds, sim.bring_the_store_back)


def slow_the_store(sim: Mesh, _: Worker, fault: Fault) -> None:
    sim.store.slow = True
    sim.time.after(fault.seconds, setattr, sim.store, "slow", False)


def make_the_store_unsure(sim: Mesh, _: Worker, fault: Fault) -> None:
    sim.store.unsure = True
    sim.time.after(fault.seconds, setattr, sim.store, "unsure", False)


def lose_the_next_write(sim: Mesh, _: Worker, fault: Fault) -> None:
    """Its outcome is unknown to the leader: it did not happen, it did, or it happens later."""
    chosen(sim, fault).store.fates["transact"] = ("lost", "done", "late", "done", "late")[fault.other]


def lose_a_call_about_a_lease(sim: Mesh, _: Worker, fault: Fault) -> None:
    call = ("grant", "keep_alive", "revoke")[fault.other % 3]
    for node in sim.nodes.values():
        node.store.fates[call] = sim.random.choice(("lost", "done", "late", "slow", "hangs"))


def deafen_a_lighthouse(sim: Mesh, _: Worker, fault: Fault) -> None:
    """What changes in the store it learns from what it reads only."""
    node = chosen(sim, fault)
    node.store.deaf = True
    sim.time.after(fault.seconds, sim.hear_again, node)


def delay_the_watches(sim: Mesh, _: Worker, fault: Fault) -> None:
    sim.store.watches_are_late = True
    sim.time.after(fault.seconds, setattr, sim.store, "watches_are_late", False)


def break_the_watches(sim: Mesh, _: Worker, __: Fault) -> None:
    for watch in sim.store.watches:
        watch.breaks()


# ---- links


def break_the_links_of_lighthouses(sim: Mesh, _: Worker, fault: Fault) -> None:
    """They end, and there is no way from one to the other for a while."""
    for one, other in sim.pairs():
        sim.part_lighthouses(one, other, fault.seconds, silently=False)


def part_the_lighthouses(sim: Mesh, _: Worker, fault: Fault) -> None:
    """Nothing arrives, and nobody is told."""
    for one, other in sim.pairs():
        sim.part_lighthouses(one, other, fault.seconds, silently=True)


def part_from_a_lighthouse(sim: Mesh, worker: Worker, fault: Fault) -> None:
    sim.part_group(worker.name, chosen(sim, fault), fault.seconds)


def part_some_from_a_lighthouse(sim: Mesh, _: Worker, fault: Fault) -> None:
    node = chosen(sim, fault)
    for name in sim.names:
        if sim.random.random() < 0.6:
            sim.part_group(name, node, fault.seconds)


def isolate_a_lighthouse(sim: Mesh, _: Worker, fault: Fault) -> None:
    """From the store and the other lighthouses, not from the groups."""
    node = chosen(sim, fault)
    sim.cut_from_the_store(node, fault.seconds)
    for other in sim.nodes.values():
        if other is not node:
            sim.part_lighthouses(node, other, fault.seconds, silently=bool(fault.other % 2))


def split_the_mesh(sim: Mesh, _: Worker, fault: Fault) -> None:
    """The leader with some groups on one side, all else on the other; first for the groups, later all of it."""
    leader = sim.leader
    if leader is not None:
        there = {name for name in sim.names if sim.random.random() < 0.5}
        first = sim.random.choice((0.0, 0.5, 3.0, 7.0))
        for name in sim.names:
            for node in sim.nodes.values():
                if (node is leader) != (name in there):
                    sim.keep_away(name, node, first + fault.seconds, silently=bool(fault.other % 2))
        sim.time.after(first, _part_from_all, sim, leader, fault.seconds)


def _part_from_all(sim: Mesh, leader: Node, seconds: float) -> None:
    sim.cut_from_the_store(leader, seconds)
    for node in sim.nodes.values():
        if node is not leader:
            sim.part_lighthouses(leader, node, seconds, silently=sim.random.random() < 0.3)


def depose_unnoticed(sim: Mesh, _: Worker, fault: Fault) -> None:
    """The leader hears of nothing, and its lease object stays."""
    leader = sim.leader
    if leader is not None:
        leader.store.deaf = True
        sim.time.after(fault.seconds, sim.hear_again, leader)
        for node in sim.nodes.values():
            if node is not leader:
                node.store.fates["revoke"] = "lost"
                sim.part_lighthouses(leader, node, fault.seconds, silently=False)


def break_some_connections(sim: Mesh, _: Worker, __: Fault) -> None:
    for worker in sim.latest.values():
        if worker.connection is not None and sim.random.random() < 0.5:
            worker.connection.cut()


WEIGHTS: dict[Act, int] = {
    **GROUP_WEIGHTS,
    kill_a_lighthouse: 5,
    kill_all_lighthouses: 1,
    pause_a_lighthouse: 4,
    cut_a_lighthouse_from_the_store: 3,
    take_the_store_away: 1,
    slow_the_store: 1,
    make_the_store_unsure: 2,
    lose_the_next_write: 3,
    lose_a_call_about_a_lease: 2,
    deafen_a_lighthouse: 2,
    delay_the_watches: 1,
    break_the_watches: 1,
    break_the_links_of_lighthouses: 4,
    part_the_lighthouses: 2,
    part_from_a_lighthouse: 2,
    part_some_from_a_lighthouse: 2,
    isolate_a_lighthouse: 2,
    split_the_mesh: 5,
    depose_unnoticed: 2,
    break_some_connections: 1,
}
FAULTS = {act.__name__: act for act in WEIGHTS}
KINDS = [act.__name__ for act, weight in WEIGHTS.items() for _ in range(weight)]
