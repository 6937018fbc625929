"""Scripts of faults that broke a draft of the failover rules. The rules must withstand each.

A script yields seconds to wait, or a condition to wait for. ``a`` is the leader when it begins, ``b`` the standby.
``make mutants`` shows for most of them which bug they catch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keepstep_lighthouse.leadership.campaign import Leadership
from keepstep_lighthouse.quorum.events import EvictOrdered
from keepstep_mesh.protocol.policy import Policy
from tests.simulation.actors.node import Node
from tests.simulation.actors.worker import Worker
from tests.simulation.simulation import Script, Simulation

LEASE = 3.0
LONG = 60.0
"""Seconds; beyond the end of every trace."""


@dataclass(frozen=True)
class Trace:
    script: Callable[..., Script]
    settings: dict[str, Any]

    def play(self, seed: int = 0, *, tracing: bool = False) -> Simulation:
        """Run the trace. Raises ``Violation`` when a rule is broken."""
        sim = self.prepare(seed)
        sim.tracing = tracing
        sim.play(self.script)
        return sim

    def prepare(self, seed: int) -> Simulation:
        return Simulation(seed, (), **self.settings)


TRACES: dict[str, Trace] = {}


def trace(**settings: Any) -> Callable[[Callable[..., Script]], Callable[..., Script]]:
    """Register a trace with two groups and two lighthouses. ``settings`` of ``Simulation`` take precedence.

    The groups heal: while one catches up, a script that waits for its state would see another course.
    """

    def keep(script: Callable[..., Script]) -> Callable[..., Script]:
        common = {"groups": 2, "policy": ONE_IS_ENOUGH, "lighthouses": 2, "lease": LEASE, "careful": True}
        common |= {"rate": 1.0, "quiet_at": 20.0, "catches_up": False}
        TRACES[script.__name__] = Trace(script, {**common, **settings})
        return script

    return keep


ONE_IS_ENOUGH = Policy(min_replicas=1, join_timeout=4.0, heal_timeout=3.0, takeover_grace=0.2)
ALL_TWO = Policy(min_replicas=2, join_timeout=4.0, heal_timeout=3.0, takeover_grace=0.2)


def training(sim: Simulation, rounds: int = 4) -> Script:
    """Wait until all groups have trained in one quorum for ``rounds``, and all standbys are linked to the leader."""
    yield lambda: sim.leader is not None and len(sim.stored.members) == len(sim.names)
    so_far = sim.quorums.rounds
    yield lambda: sim.quorums.rounds >= so_far + rounds and len(leader(sim).lighthouse.followers) == len(sim.nodes) - 1


def leadership(node: Node) -> Leadership:
    """Return the node's part in the election."""
    assert node.lighthouse.leadership is not None
    return node.lighthouse.leadership


def cut_session(worker: Worker) -> None:
    """Cut the connection of a group to its lighthouse, if it has one."""
    if (connection := worker.session.connection) is not None:
        connection.cut()


def leader(sim: Simulation) -> Node:
    assert sim.leader is not None
    return sim.leader


def other(sim: Simulation, *than: Node) -> Node:
    return next(node for node in sim.nodes.values() if node not in than)


def group(sim: Simulation, number: int) -> Worker:
    worker: Worker = sim.latest[f"r{number}"]
    return worker


def comes_to(sim: Simulation, worker: Any, node: Node) -> Script:
    """Connect ``worker`` to ``node`` without trying all other lighthouses first."""
    session = worker.session
    while session.connection not in sim.mesh.between(worker.name, node.address):
        session.addresses.lost(session.address, LONG)
        session.addresses.follow(node.address)
        session.hang_up()
        yield 0.1


# ---- traces that broke the first draft


@trace(policy=ALL_TWO)
def a_quorum_id_raised_for_a_failed_commit_outlives_the_leader(sim: Simulation) -> Script:
    yield from training(sim)
    a, before = leader(sim), sim.stored.quorum_id
    group(sim, 0).fail_next = True
    yield lambda: sim.quorums.highest.quorum_id > before
    sim.kill_lighthouse(a, LONG)
    yield lambda: sim.leader is not None and sim.quorums.announced_by == sim.leader.name


@trace()
def a_deposed_leader_that_hears_of_nothing_stops_before_its_lease_ends(sim: Simulation) -> Script:
    """Its lease still exists: the revocation was lost."""
    yield from training(sim)
    a = leader(sim)
    b = other(sim, a)
    a.store.deaf = True
    b.store.fates["revoke"] = "lost"
    sim.mesh.partition(a.address, b.address, LONG, silently=False)
    yield lambda: sim.leader is b
    yield 3 * LEASE


def _unknown(fate: str) -> Callable[..., Script]:
    def script(sim: Simulation) -> Script:
        """The leader does not learn the outcome of the write of a quorum, and is partitioned. Another one leads."""
        yield from training(sim)
        a, before = leader(sim), sim.stored.quorum_id
        term = a.lighthouse.term
        a.store.fates["transact"] = fate
        group(sim, 0).fail_next = True
        yield lambda: "transact" not in a.store.fates
        yield 1.0
        if a.lighthouse.term is not term or sim.quorums.highest.quorum_id == before:
            sim.violated("the leader did not read back its write and retry within its lease")
        sim.cut_from_the_store(a, 2 * LEASE)
        sim.mesh.partition(a.address, other(sim, a).address, 2 * LEASE, silently=False)
        yield lambda: sim.quorums.highest.quorum_id > before

    script.__name__ = f"a_write_of_a_quorum_that_is_{fate}"
    return script


for one in ("lost", "done", "late"):
    trace(policy=ALL_TWO)(_unknown(one))


@trace()
def a_write_of_unknown_outcome_and_the_leader_dies(sim: Simulation) -> Script:
    yield from training(sim)
    a, before = leader(sim), sim.stored.quorum_id
    a.store.fates["transact"] = "lost"
    group(sim, 0).fail_next = True
    yield lambda: "transact" not in a.store.fates
    yield 0.05
    sim.kill_lighthouse(a, 1.0)
    yield lambda: sim.quorums.highest.quorum_id > before


@trace()
def an_eviction_whose_write_is_lost_is_told_when_it_is_written(sim: Simulation) -> Script:
    yield from training(sim)
    a = leader(sim)
    a.store.fates["transact"] = "lost"
    sim.order(EvictOrdered("r0", "bad disk", 0.0, "ann"))
    yield 0.02
    sim.kill_lighthouse(a, LONG)
    yield lambda: sim.leader is not None and len(sim.stored.members) == 2


@trace()
def an_eviction_outlives_the_leader(sim: Simulation) -> Script:
    """The evicted group is not told, and comes to the next leader with the state of its session."""
    yield from training(sim)
    a = leader(sim)
    sim.mesh.partition("r0", a.address, LONG)
    sim.order(EvictOrdered("r0", "bad disk", 0.0, "ann"))
    yield lambda: bool(sim.stored.evicted)
    sim.kill_lighthouse(a, LONG)


@trace(policy=ALL_TWO)
def a_round_that_only_some_members_heard_of(sim: Simulation) -> Script:
    """The leader dies when r0 has its answer and r1 has none."""
    yield from training(sim)
    a, r0, r1 = leader(sim), group(sim, 0), group(sim, 1)
    asked_first = False
    while not asked_first:
        yield lambda: r1.session.core.open is not None and r0.session.core.open is None
        yield 0.006  # its request has arrived
        asked_first = r0.session.core.open is None and r1.session.core.open is not None
    sim.mesh.partition("r1", a.address, LONG)
    yield lambda: r0.plan is not None and r1.plan is None
    sim.kill_lighthouse(a, LONG)
    if r1.session.connection is not None:
        r1.session.connection.rejoin()


@trace(quiet_at=40.0)
def a_leader_that_is_cut_off_closes_its_sessions(sim: Simulation) -> Script:
    """The groups still reach it, and would stay."""
    yield from training(sim)
    a = leader(sim)
    sim.cut_from_the_store(a, LONG)
    b = other(sim, a)
    sim.mesh.partition(a.address, b.address, LONG)
    yield lambda: sim.leader is b
    so_far = sim.quorums.rounds
    yield lambda: sim.quorums.rounds > so_far + 4


@trace()
def two_groups_at_an_equal_step_with_different_weights(sim: Simulation) -> Script:
    """r1 does not commit the step that r0 commits; it goes on alone to the same step, then r0 comes back."""
    yield from training(sim)
    a, r0, r1 = leader(sim), group(sim, 0), group(sim, 1)
    so_far, behind = r0.commits, r1.commits
    while r0.commits == so_far or r1.commits > behind:
        yield lambda: r0.contributed and r1.contributed
        so_far, behind = r0.commits, r1.commits
        r1.fail_commit()
        yield lambda: r0.plan is None  # it committed, or learned in time that r1 failed
    for address in sim.nodes:
        sim.mesh.refuse(r0.name, address)
    if r0.session.connection is not None:
        r0.session.connection.cut()
    yield lambda: r1.step == r0.step
    r1.freeze(2.0)
    for address in sim.nodes:
        sim.mesh.rejoin(r0.name, address)
    yield from comes_to(sim, r0, a)


@trace(lease=6.0)
def a_group_that_met_the_next_leader_comes_back_to_the_one_before(sim: Simulation) -> Script:
    yield from training(sim)
    a = leader(sim)
    b, r0 = other(sim, a), group(sim, 0)
    b.store.fates["revoke"] = "lost"
    sim.cut_from_the_store(a, 20.0)
    sim.mesh.partition(a.address, b.address, 20.0, silently=False)
    yield lambda: sim.leader is b
    yield from comes_to(sim, r0, b)
    yield lambda: r0.session.welcomed
    yield from comes_to(sim, r0, a)
    yield 3.0


# ---- traces that were found later


@trace(lighthouses=3, lease=6.0)
def the_deposer_releases_the_key_and_a_third_takes_it(sim: Simulation) -> Script:
    """A deposed leader may confirm its quorum until its lease ends, although the third lighthouse finds no key."""
    yield lambda: sim.leader is not None
    a = leader(sim)
    b = other(sim, a)
    c = other(sim, a, b)
    yield lambda: len(a.lighthouse.followers) == 2
    yield lambda: "r0" in sim.latest and "r1" in sim.latest
    for node in (b, c):
        sim.mesh.partition("r0", node.address, 20.0)
    sim.mesh.partition("r1", a.address, 20.0)
    cut_session(group(sim, 1))
    yield lambda: [one.partition(":")[0] for one in sim.stored.members] == ["r0"]
    yield lambda: group(sim, 0).commits > 2
    a.store.deaf = True
    sim.cut_from_the_store(a, 20.0)
    b.store.fates["revoke"] = "lost"
    sim.mesh.partition(a.address, b.address, 20.0, silently=False)
    sim.mesh.partition(a.address, c.address, 20.0)
    yield lambda: sim.leader is b
    yield 0.1
    b.loop.call_soon(partial(leadership(b).give_up, "told to", stand_back=True))
    yield lambda: sim.leader is c
    yield from comes_to(sim, group(sim, 1), c)
    yield 6.0


@trace()
def a_leader_that_slept_past_its_lease_says_nothing(sim: Simulation) -> Script:
    """A request waits in its socket. After the pause it reads the request before any timer fires."""
    yield from training(sim)
    a = leader(sim)
    yield lambda: any(sim.latest[name].session.core.open is None for name in sim.names)
    sim.pause(a, LEASE + 0.6)
    yield lambda: not a.loop.asleep
    yield lambda: sim.leader is not None


@trace()
def a_leader_whose_lease_is_being_given_back_does_not_spin(sim: Simulation) -> Script:
    """The store revokes the lease and does not answer: the key is gone before the term is closed."""
    yield from training(sim)
    a = leader(sim)
    b = other(sim, a)
    b.store.fates["transact"] = "lost"  # the lighthouse tries twice
    sim.kill_lighthouse(a, LONG)
    yield lambda: sim.leader is b
    b.store.fates["revoke"] = "hangs"
    sim.store.revoke(leadership(b)._lease)
    yield lambda: sim.leader is b and b.lighthouse.leading().epoch > 2


@trace()
def a_renewal_counts_from_when_it_was_sent(sim: Simulation) -> Script:
    """The answer comes late, and then the store is away."""
    yield from training(sim)
    a = leader(sim)
    b = other(sim, a)
    a.store.deaf = b.store.deaf = True
    a.store.fates["keep_alive"] = "slow"
    yield lambda: "keep_alive" not in a.store.fates
    yield 0.95
    sim.mesh.partition(a.address, b.address, 12.0)
    sim.cut_from_the_store(a, 12.0)
    yield 12.0


@trace(rate=0.92)
def a_slow_clock_is_within_the_margin_of_the_lease(sim: Simulation) -> Script:
    yield from training(sim)
    sim.store.away = True
    yield 2 * LEASE
    sim.bring_the_store_back()


@trace()
def a_leader_that_no_group_reaches_gives_way(sim: Simulation) -> Script:
    yield from training(sim)
    a = leader(sim)
    for name in sim.names:
        sim.mesh.partition(name, a.address, LONG)
        cut_session(sim.latest[name])
    yield lambda: sim.leader is not None and sim.leader is not a
    so_far = sim.quorums.rounds
    yield lambda: sim.quorums.rounds > so_far + 4


def a_stranger_asks_the_next_leader(sim: Simulation) -> Script:
    """The leader of r0 is cut off from B and the store, and is not notified. r1, which is no member, asks B."""
    yield lambda: sim.leader is not None and len(leader(sim).lighthouse.followers) == 1
    a = leader(sim)
    b = other(sim, a)
    yield lambda: "r1" in sim.latest and "r0" in sim.latest
    sim.mesh.partition("r0", b.address, 20.0)
    sim.mesh.partition("r1", a.address, 20.0)
    cut_session(group(sim, 1))
    yield lambda: [one.partition(":")[0] for one in sim.stored.members] == ["r0"] and group(sim, 0).commits > 2
    sim.cut_from_the_store(a, 20.0)
    sim.mesh.partition(a.address, b.address, 20.0, silently=False)
    b.store.fates["revoke"] = "lost"
    yield lambda: sim.leader is b
    yield from comes_to(sim, group(sim, 1), b)
    yield 8.0


trace(lease=6.0)(a_stranger_asks_the_next_leader)


@trace(lease=6.0)
def the_next_leader_has_a_shorter_lease(sim: Simulation) -> Script:
    """The lighthouses are restarted one by one with another --lease."""
    yield lambda: sim.leader is not None
    b = other(sim, leader(sim))
    sim.restart_with_lease(b, 2.0)
    yield 1.0
    yield from a_stranger_asks_the_next_leader(sim)


def _bit_flips(lost: str) -> Callable[..., Script]:
    def script(sim: Simulation) -> Script:
        """A bit of r1's state flips, and the leader dies ``lost``. The next leader finds it, and r1 heals."""
        yield from training(sim)
        a, worker = leader(sim), group(sim, 1)
        worker.flip_a_bit()
        if lost == "when the roots have been asked for":
            yield lambda: worker.root is not None
        else:
            yield lambda: worker.lineage == f"diverged:{worker.replica_id}"
            worker.fail_next = True
        sim.kill_lighthouse(a, LONG)
        yield lambda: not worker.flipped
        so_far = worker.commits
        yield lambda: worker.commits > so_far + 3

    script.__name__ = "a_bit_flips_and_the_leader_dies_" + lost.replace(" ", "_")
    return script


for one in ("when the roots have been asked for", "when it was found"):
    trace(groups=3, policy=replace(ONE_IS_ENOUGH, verify_every=1))(_bit_flips(one))


@trace(groups=3, finishes=True)
def a_bit_flips_after_the_last_step(sim: Simulation) -> Script:
    """It is found where the groups finish, and r1 finishes with the weights of the others."""
    yield lambda: "r1" in sim.latest and sim.latest["r1"].takes_no_step
    worker = group(sim, 1)
    worker.flip_a_bit()
    yield lambda: worker.finished
    if worker.flipped:
        sim.violated("a group finishes with a flipped bit")


@trace()
def the_store_is_away_for_longer_than_a_lease(sim: Simulation) -> Script:
    yield from training(sim)
    sim.store.away = True
    yield 2 * LEASE
    if sim.leader is not None:
        sim.violated("a lighthouse leads without a lease")
    sim.bring_the_store_back()
