"""Some seeds of the simulation. ``make simulate`` runs many more."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.one_copy.core.recovery_plan import Kind
from keepstep_lighthouse.quorum.shards import Shards
from keepstep_mesh.protocol.policy import Policy
from tests.simulation.actors.troubles import TROUBLES_TIMEOUT_SECONDS
from tests.simulation.checks.hangs import HANG_AFTER
from tests.simulation.checks.violation import Violation
from tests.simulation.run import Modes, explain, violation
from tests.simulation.simulation import Script, Simulation
from tests.simulation.virtual import process


@pytest.mark.parametrize("first", range(0, 64, 8))
def test_no_rule_is_broken_with_one_lighthouse(first: int) -> None:
    for seed in range(first, first + 8):
        assert violation(seed, lighthouses=1, careful=True) is None, explain(seed, lighthouses=1)


@pytest.mark.parametrize("ports", [False, True])
def test_a_simulated_lighthouse_logs_to_the_trace_alone(capfd: pytest.CaptureFixture[str], ports: bool) -> None:
    """A part of it that is not simulated, such as a look at a real port, fails and logs its error."""
    for seed in range(2, 5):
        assert violation(seed, ports=ports) is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("lighthouses", [2, 3])
@pytest.mark.parametrize("first", range(0, 64, 16))
def test_no_rule_is_broken_with_several_lighthouses(first: int, lighthouses: int) -> None:
    for seed in range(first, first + 16):
        found = violation(seed, lighthouses=lighthouses, careful=seed % 4 == 0)
        assert found is None, explain(seed, lighthouses=lighthouses)


@pytest.mark.parametrize("lighthouses", [1, 2])
def test_groups_finish_together_or_learn_that_the_others_did(lighthouses: int) -> None:
    for seed in range(16):
        found = violation(seed, lighthouses=lighthouses, careful=True, finishes=True)
        assert found is None, explain(seed, lighthouses=lighthouses, finishes=True)


def test_no_rule_is_broken_when_lighthouses_look_at_ports() -> None:
    for seed in range(12):
        found = violation(seed, careful=True, ports=True)
        assert found is None, explain(seed, ports=True)


def test_a_dead_group_is_lost_by_its_port_and_a_living_one_behind_a_firewall_is_not() -> None:
    sim = Simulation(1, (), groups=3, lighthouses=1, careful=True, ports=True, quiet_at=10.0)
    assert sim.ports is not None
    ports = sim.ports
    ports.refuses_from = {"r0": 0.0}

    def breaks_and_kills(sim: Simulation) -> Script:
        yield lambda: sim.quorums.rounds > 3
        for _ in range(5):
            connection = sim.latest["r0"].session.connection
            assert connection is not None
            connection.cut()
            yield 0.5
        sim.latest["r1"].die()
        yield lambda: ports.proofs == 1

    sim.play(breaks_and_kills)
    assert ports.proofs == 1


@pytest.mark.parametrize("lighthouses", [1, 2])
def test_spares_take_the_places_of_groups_that_are_lost_or_replaced(lighthouses: int) -> None:
    for seed in range(16):
        found = violation(seed, lighthouses=lighthouses, careful=True, spares=True)
        assert found is None, explain(seed, lighthouses=lighthouses, spares=True)


@pytest.mark.parametrize(
    "modes",
    [{"hangs": True}, {"hangs": True, "finishes": True}, {"hangs": True, "spares": True}],
    ids=["train", "finish", "spares"],
)
def test_groups_that_hang_are_ended_and_slow_ones_are_not(modes: Modes) -> None:
    ended = 0
    for seed in range(12, 24):
        sim = Simulation(seed, careful=True, **modes)
        try:
            sim.run()
        except Violation:
            pytest.fail(explain(seed, **modes))
        assert sim.hangs is not None
        ended += sim.hangs.ended
    assert ended


def test_a_group_that_hangs_is_ended_within_its_limit() -> None:
    policy = Policy(join_timeout=60.0, hang_after=HANG_AFTER)
    sim = Simulation(1, (), groups=3, policy=policy, lighthouses=1, rate=1.0, careful=True, quiet_at=10.0, hangs=True)

    def one_hangs(sim: Simulation) -> Script:
        yield lambda: "r1" in sim.latest and sim.latest["r1"].commits > 4
        sim.latest["r1"].thread.begins("hangs", 0.0)
        began = sim.time.now
        yield lambda: sim.hangs is not None and sim.hangs.ended == 1
        assert sim.time.now - began < 1.5 * HANG_AFTER

    sim.play(one_hangs)


@pytest.mark.parametrize(
    "modes",
    [{"one_copy": True}, {"one_copy": True, "spares": True}, {"one_copy": True, "finishes": True}],
    ids=["no spares", "spares", "finish"],
)
def test_no_committed_step_of_a_model_that_exists_once_is_lost(modes: Modes) -> None:
    kinds: set[Kind] = set()
    for seed in range(50, 56):
        sim = Simulation(seed, careful=True, **modes)
        try:
            sim.run()
        except Violation:
            pytest.fail(explain(seed, **modes))
        assert sim.shards is not None
        kinds.update(sim.shards.kinds)
    assert kinds >= {Kind.FRESH, Kind.RESIZED, *([Kind.REPLACED] if "spares" in modes else [])}


def a_member_and_its_keeper_hang(seed: int) -> Simulation:
    policy = Policy(join_timeout=1.0)
    sim = Simulation(seed, (), groups=4, policy=policy, lighthouses=1, careful=True, quiet_at=20.0, one_copy=True)
    assert sim.shards is not None
    assert sim.shards.copies == 1

    def hang(sim: Simulation) -> Script:
        yield lambda: sim.quorums.rounds > 8
        ((shard, _),) = sim.latest["r0"].trainers[0].model.shards
        for seat in shard.world.seats[1:3]:
            sim.workers[seat.replica_id].hangs_until = sim.time.now + 6.0
        yield 9.0

    sim.play(hang)
    return sim


@pytest.mark.parametrize("seed", [0, 3])
def test_a_member_that_hangs_with_its_keeper_loses_no_shards(seed: int) -> None:
    sim = a_member_and_its_keeper_hang(seed)
    assert sim.shards is not None
    assert not sim.shards.over


def test_a_lighthouse_that_leaves_out_members_with_shards_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shards, "waits", lambda *_: None)
    with pytest.raises(Violation, match="have shards, and are not in quorum"):
        a_member_and_its_keeper_hang(0)


@pytest.mark.parametrize("seed", [101, 217])
def test_members_that_only_a_deposed_lighthouse_reached_are_not_missed(seed: int) -> None:
    """It formed a quorum that it could not store. The next one with that number is of a lighthouse without them."""
    found = violation(seed, careful=True, one_copy=True)
    assert found is None, explain(seed, one_copy=True)


@pytest.mark.parametrize("lighthouses", [1, 2])
def test_steps_are_retried_with_the_gradients_of_the_state_that_the_job_goes_on_from(lighthouses: int) -> None:
    for seed in range(16):
        found = violation(seed, lighthouses=lighthouses, careful=True, retries=True)
        assert found is None, explain(seed, lighthouses=lighthouses, retries=True)


def test_a_group_that_was_behind_does_not_retry_with_gradients_of_other_weights() -> None:
    """Its quorum fails before it has healed, and the groups that are left take the step again."""
    found = violation(138, lighthouses=1, careful=True, retries=True)
    assert found is None, explain(138, lighthouses=1, retries=True)


def test_a_group_that_caught_up_halfway_does_not_heal_from_groups_that_began_again() -> None:
    """It holds a state at step 4 when all that it follows restart. A heal from step 0 would lose that."""
    found = violation(332, lighthouses=1, careful=True, catches_up=True)
    assert found is None, explain(332, lighthouses=1, catches_up=True)


def test_a_group_that_has_just_caught_up_is_the_only_one_with_the_last_step() -> None:
    """The step fails in the group that it followed, and the job goes on from the group that caught up."""
    found = violation(30416, careful=True, finishes=True, spares=True)
    assert found is None, explain(30416, finishes=True, spares=True)


def test_a_simulation_counts_its_futures_from_one_whatever_ran_before_it() -> None:
    """Their numbers decide the order of sets of them: otherwise a seed that fails in a long run may pass alone."""

    def futures() -> int:
        Simulation(1, lighthouses=3).run()
        return next(process._ordinals)

    assert futures() == futures()


def test_a_collective_times_out_whose_group_learns_of_no_loss() -> None:
    """The old leader ends with the news, and the next leader knows of no member that was lost."""
    assert violation(569, careful=True) is None, explain(569)


def test_groups_finish_in_a_quorum_below_min_replicas() -> None:
    """A group leaves at its last step, and another one still heals. No step follows, so fewer groups are enough."""
    found = violation(5158, careful=True, troubles=True, finishes=True)
    assert found is None, explain(5158, troubles=True, finishes=True)


def test_groups_retry_steps_and_send_no_bad_message() -> None:
    """A lighthouse that refuses a message ends its session, and no rule is broken then either."""
    retried = 0
    for seed in range(500, 506):
        sim = Simulation(seed, retries=True)
        sim.tracing = True
        sim.run()
        retried += sim.logs.events("step_retried")
        assert not [line for line in sim.trace if "bad message" in line]
    assert retried


@pytest.mark.parametrize("retries", [False, True])
def test_no_rule_is_broken_when_groups_keep_others_from_committing(retries: bool) -> None:
    for seed in range(12):
        found = violation(seed, careful=True, troubles=True, retries=retries)
        assert found is None, explain(seed, troubles=True, retries=retries)


@pytest.mark.parametrize("trouble", ["fails", "lies", "heals in vain", "cut off"])
def test_the_others_go_on_without_an_operator_and_keep_their_pace(trouble: Any) -> None:
    sim = Simulation(3, (), groups=4, policy=Policy(), lighthouses=1, careful=True, quiet_at=140.0, troubles=True)
    commits: list[int] = []

    def trains(sim: Simulation) -> Script:
        yield lambda: sim.quorums.rounds > 3
        yield 5.0
        commits.append(sim.latest["r0"].commits)
        yield 60.0
        commits.append(sim.latest["r0"].commits)
        assert sim.troubles is not None
        if trouble == "cut off":
            sim.collectives.partition("r2", "r3", 80.0)
        else:
            sim.troubles.begin("r3", trouble)
        if trouble == "heals in vain":
            sim.latest["r3"].die()
            sim.launch("r3")
        yield 2 * TROUBLES_TIMEOUT_SECONDS + 3.0
        commits.append(sim.latest["r0"].commits)
        yield 60.0
        commits.append(sim.latest["r0"].commits)

    sim.play(trains)
    _, before, during_begin, during_end = commits
    assert during_end - during_begin >= 0.9 * (before - commits[0])
