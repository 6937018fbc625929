"""Bugs in spares and in the replacement of groups."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test

CHANGES = "services/keepstep_lighthouse/quorum/spares.py"
SCENARIOS = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says"
SIMULATION = "tests/simulation/test_simulation.py::test_spares_take_the_places_of_groups_that_are_lost_or_replaced[1]"
CORE = "tests/unit/keepstep_lighthouse/quorum/test_spares.py"

MUTATIONS = (
    Mutation(
        "a spare is let in before the members of the stored quorum are back",
        "services/keepstep_lighthouse/quorum/spares.py",
        "        if self._takeover.until is not None:\n            return\n",
        "",
        Test(f"{SCENARIOS}[45_spares]"),
    ),
    Mutation(
        "a group is drained for a spare that has not committed a step",
        "services/keepstep_lighthouse/quorum/spares.py",
        "    return stays and group.committed > 0 and",
        "    return stays and",
        Test(
            f"{CORE}::test_a_group_is_not_drained_for_a_spare_that_holds_the_state_of_the_job_and_has_committed_no_step"
        ),
    ),
    Mutation(
        "a group that asks at its old state again has committed a step",
        "services/keepstep_lighthouse/quorum/groups/groups.py",
        "committed = not (failed or same_step or same_state)\n",
        "committed = not (failed or same_step)\n",
        Test(f"{SCENARIOS}[47_spares_at_the_end]"),
    ),
    Mutation(
        "a group is drained for a spare that has not healed",
        "services/keepstep_lighthouse/quorum/spares.py",
        " and group.holds_newest()",
        "",
        Test(f"{CORE}::test_a_group_is_not_drained_for_a_spare_that_has_not_healed"),
    ),
    Mutation(
        "a group is drained for one that has weights of a history that the job has left",
        "services/keepstep_lighthouse/quorum/groups/group.py",
        "        return took_step and origin(self.lineage).quorum_id == last.quorum_id\n",
        "        return is_committed(self.lineage)\n",
        Test(
            f"{CORE}::"
            "test_a_group_is_not_drained_while_another_one_still_has_weights_of_a_history_that_the_job_has_left"
        ),
    ),
    Mutation(
        "a group is drained although another one is not in the quorum",
        "services/keepstep_lighthouse/quorum/spares.py",
        "    stays = group.member and group.excluded is None",
        "    stays = group.excluded is None",
        Test(f"{SCENARIOS}[46_replacement]"),
    ),
    Mutation(
        "the unused checkpoint of a spare takes the job back from groups that took part without healing",
        "services/keepstep_lighthouse/quorum/forming/announcing.py",
        "    if request.step <= behind and not group.trained and is_loaded(request.lineage):\n",
        "    if request.step < 0 and not group.trained and is_loaded(request.lineage):\n",
        Test(
            f"{CORE}::"
            "test_the_unused_checkpoint_of_a_spare_takes_no_steps_from_groups_that_took_part_without_healing[1]"
        ),
    ),
    Mutation(
        "one spare too many is let in",
        CHANGES,
        "    missing = min(target + len(leaving), most) - groups.counted\n",
        "    missing = min(target + len(leaving), most) - groups.counted + 1\n",
        Test(SIMULATION),
    ),
    Mutation(
        "a group that leaves is not replaced while it stays",
        CHANGES,
        "    missing = min(target + len(leaving), most) - groups.counted\n",
        "    missing = min(target, most) - groups.counted\n",
        Test(SIMULATION),
    ),
    Mutation(
        "the finish waits for the return of a group whose place a spare has",
        "services/keepstep_lighthouse/quorum/spares.py",
        "            self._departures.expect_none()",
        "            pass",
        Test(f"{SCENARIOS}[47_spares_at_the_end]"),
    ),
    Mutation(
        "a group that finishes is replaced",
        "services/keepstep_lighthouse/quorum/spares.py",
        "        return bool(self._job.finished_step) and self._job.record.ended is None\n",
        "        return bool(self._job.finished_step) and self._job.record.ended is not None\n",
        Test(f"{SCENARIOS}[47_spares_at_the_end]"),
    ),
    Mutation(
        "a spare trains the whole job again after its groups were stopped",
        "services/keepstep_lighthouse/quorum/spares.py",
        "            self._send_home()\n        if not (",
        "            pass\n        if not (",
        Test(f"{SCENARIOS}[47_spares_at_the_end]"),
    ),
    Mutation(
        "a spare counts from its arrival on",
        "services/keepstep_lighthouse/quorum/presence/arrivals.py",
        "        if event.standby and not member:\n",
        "        if event.standby and member:\n",
        Test(f"{SCENARIOS}[45_spares]"),
    ),
    Mutation(
        "a process that was started again counts when the old one of its name is lost",
        "services/keepstep_lighthouse/quorum/groups/groups.py",
        "        if group.stands_by:\n            self.exclude(group, Excluded(Exclusion.SPARE))\n        elif",
        "        if",
        Test(f"{CORE}::test_the_restarted_process_of_a_name_stands_by_also_when_it_came_before_the_old_one_was_lost"),
    ),
    Mutation(
        "a change of leader forgets the order to replace a group",
        "services/keepstep_lighthouse/jobs/records.py",
        "for name, one in value.items() if name in hints})",
        "for name, one in value.items() if name in hints and name != 'replacing'})",
        Test(f"{CORE}::test_two_orders_and_one_spare_replace_one_group"),
    ),
    Mutation(
        "a spare ends where the job does not begin at its state, although a relay has a later one",
        "libs/keepstep/step/step_quorum.py",
        "            if may_resume and isinstance(error, StartRefused):\n                raise\n",
        "",
        Test(
            "tests/services/manager/durable/test_durable_checkpoints.py::"
            "test_a_spare_that_is_left_alone_loads_the_newest_one_although_there_was_none_when_it_came[2]"
        ),
    ),
    Mutation(
        "a group with a notice leaves at once",
        "libs/keepstep/lifecycle/membership.py",
        "        if context is None or self.ended or not notice or context.asks.stands_by:\n",
        "        if context is None or not notice or not context.asks.stands_by:\n",
        Test(
            "tests/training/operation/test_spares.py::"
            "test_spares_take_the_places_of_groups_that_are_killed_replaced_or_preempted"
        ),
    ),
)
