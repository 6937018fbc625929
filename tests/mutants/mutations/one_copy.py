"""Bugs about a model that exists once: which states are kept, how a job continues, and which quorums may form."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test

SHARDS = Test("tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[54_shards]")
SIMULATION = "tests/simulation/test_simulation.py::test_no_committed_step_of_a_model_that_exists_once_is_lost"
SESSION = "tests/services/session/test_told_unasked.py"
QUORUM = "services/keepstep_lighthouse/quorum"
CORE = "libs/keepstep/one_copy/core"
TESTS = "tests/unit/keepstep/one_copy/core"
PLANS = f"{TESTS}/test_recovery_plan.py"
LEDGER = f"{TESTS}/test_copy_ledger.py"
CUT = Test(
    "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[56_cut_between_two_shards]"
)
MOMENTS = f"{TESTS}/test_commit_rule.py::test_members_lost_between_any_two_messages_lose_no_step[in a later step]"

MUTATIONS = (
    Mutation(
        "ranks whose loaders take other samples commit steps together",
        "libs/keepstep/one_copy/attempts.py",
        "values[3] == -values[4], values[7] in (-values[8], NO_LOADER)\n",
        "values[3] == -values[4], True\n",
        Test(
            "tests/training/one_copy/test_refusals_of_one_copy.py"
            "::test_a_member_whose_loader_takes_other_samples_is_refused_and_no_step_is_committed_with_it"
        ),
    ),
    Mutation(
        "a lighthouse that took over does not know who keeps the shards of a member that is gone",
        f"{QUORUM}/groups/shard_sources.py",
        "                self._note(owner, (*self._of.get(owner, ()), member))\n",
        "                pass\n",
        SHARDS,
    ),
    Mutation(
        "a keeper is believed although the owner says that it has no copies",
        f"{QUORUM}/groups/shard_sources.py",
        "            if owner not in self._told:\n",
        "            if owner:\n",
        SHARDS,
    ),
    Mutation(
        "two members that name each other are not believed at once",
        f"{QUORUM}/probation/evidence.py",
        "strike.round < number or one in believed",
        "strike.round < number",
        CUT,
    ),
    Mutation(
        "a member without which shards are lost is parted",
        f"{QUORUM}/probation/probation.py",
        "return self._shards.complete_without({name}), name not in proven, arrived, name",
        "return True, name not in proven, arrived, name",
        CUT,
    ),
    Mutation(
        "a member and its keeper are parted together",
        f"{QUORUM}/probation/probation.py",
        "            if self._shards.complete_without({*parted, name}):\n",
        "            if self._shards.complete_without({name}):\n",
        CUT,
    ),
    Mutation(
        "the only member that knows of a commit is parted",
        f"{QUORUM}/shards.py",
        "        return any(worth(one) == newest for one in kept)\n",
        "        return True\n",
        CUT,
    ),
    Mutation(
        "no spare takes the place of a parted member before the next quorum",
        f"{QUORUM}/settling.py",
        "                features.spares.settle(now)  # a spare takes the place of a group that is parted\n",
        "                pass\n",
        CUT,
    ),
    Mutation(
        "a step goes on to its timeout when a member of it is cut off",
        "libs/keepstep/step/evidence/failure_evidence.py",
        "                    cut, step.doubted = step.doubted & silent, silent\n",
        "                    cut, step.doubted = step.doubted & silent, set()\n",
        Test(
            "tests/unit/keepstep/step/test_failure_evidence.py"
            "::test_a_group_without_an_answer_to_two_probes_of_one_stall_is_cut_off"
        ),
    ),
    Mutation(
        "the base of a dead member does not show that it has committed a step",
        f"{CORE}/recovery_plan.py",
        "    known |= {(copy.committed, copy.world) for one in holdings for copy in one.copies "
        "if copy.committed is not None}\n",
        "",
        Test(f"{PLANS}::test_a_base_at_a_keeper_shows_that_the_dead_member_committed_its_step"),
    ),
    Mutation(
        "the job continues from the oldest state that can be had",
        f"{CORE}/recovery_plan.py",
        "        reverse=True,\n",
        "        reverse=False,\n",
        Test(MOMENTS),
    ),
    Mutation(
        "an older state of a later world comes first",
        f"{CORE}/recovery_plan.py",
        "key=lambda one: (one[0].worth, one[1], one[3].number)",
        "key=lambda one: (one[1], one[3].number, one[0].worth)",
        Test(f"{PLANS}::test_an_older_state_in_a_later_world_undoes_no_step"),
    ),
    Mutation(
        "new shards are used before a rank knows that all have them",
        f"{CORE}/recovery_plan.py",
        "(one[0].worth, one[1], one[3].number)",
        "(one[0].worth, one[3].number)",
        Test(f"{PLANS}::test_new_shards_of_which_no_member_knows_that_all_have_them_are_cut_again"),
    ),
    Mutation(
        "no rank goes forward to a step that another one has committed",
        f"{CORE}/recovery_plan.py",
        "            elif shard.next_state == target:\n                yield Way.FORWARD\n",
        "",
        Test(MOMENTS),
    ),
    Mutation(
        "a rank goes forward with gradients of another quorum",
        f"{CORE}/recovery_plan.py",
        "            elif shard.next_state == target:\n",
        "            elif shard.voted and shard.state.step + 1 == target.step:\n",
        Test(f"{PLANS}::test_gradients_of_a_step_in_another_quorum_do_not_lead_to_the_target"),
    ),
    Mutation(
        "a shard of another state at an equal step is used",
        f"{CORE}/recovery_plan.py",
        "            if shard.state == target:\n",
        "            if shard.state.step == target.step:\n",
        Test(f"{PLANS}::test_gradients_of_another_attempt_do_not_mix"),
    ),
    Mutation(
        "a keeper counts that cannot rebuild the target",
        f"{CORE}/recovery_plan.py",
        "(number, rank) and target in copy.states for copy",
        "(number, rank) for copy",
        Test(f"{PLANS}::test_a_copy_that_is_not_complete_is_no_source"),
    ),
    Mutation(
        "a job whose shards are lost begins from the first step",
        f"{CORE}/recovery_plan.py",
        "Kind.LOST if lost else Kind.FRESH",
        "Kind.FRESH",
        Test(f"{PLANS}::test_a_member_and_its_keeper_lost_together_lose_the_shard"),
    ),
    Mutation(
        "a job without a committed step does not begin again",
        f"{CORE}/recovery_plan.py",
        "if lost is None and soundness(target.step, target.lineage) is not Soundness.UNTRAINED:",
        "if lost is None:",
        Test(f"{PLANS}::test_a_job_without_a_committed_step_begins_again"),
    ),
    Mutation(
        "a newcomer gets no base of the rank that it keeps",
        f"{CORE}/recovery_plan.py",
        "if not _keeps(holdings[holder[keeper]], world.number, rank, target)",
        "if rank in building",
        Test(f"{PLANS}::test_a_spare_takes_the_empty_seat_and_reads_the_shard_from_its_keeper"),
    ),
    Mutation(
        "schedulers come from a rank whose script did not go through the step",
        f"{CORE}/recovery_plan.py",
        "(ways.index(one.way), not holdings[one.holder].whole)",
        "ways.index(one.way)",
        Test(f"{PLANS}::test_schedulers_come_from_a_rank_whose_script_went_through_the_step"),
    ),
    Mutation(
        "a member that was replaced is the source of the shard of its old seat",
        f"{CORE}/recovery_plan.py",
        "one.replica_id != seat.replica_id, index",
        "False, index",
        Test(f"{PLANS}::test_the_member_in_the_seat_is_the_source_before_one_that_it_has_replaced"),
    ),
    Mutation(
        "a keeper drops the options that the replay of another slice needs",
        f"{CORE}/copy_ledger.py",
        "oldest = min(",
        "oldest = max(",
        Test(f"{LEDGER}::test_ends_are_kept_from_the_oldest_base_on"),
    ),
    Mutation(
        "gradients of a dropped attempt stay in the log",
        f"{CORE}/copy_ledger.py",
        "        self._logs[number] = [*(one for one in log if one.step < state.step), state]\n",
        "        self._logs[number] = [*log, state]\n",
        Test(f"{LEDGER}::test_gradients_of_another_attempt_replace_those_that_were_dropped"),
    ),
    Mutation(
        "a log is not cut at a new base",
        f"{CORE}/copy_ledger.py",
        "        self._logs[number] = [one for one in log if one.step > state.step]\n",
        "",
        Test(MOMENTS),
    ),
    Mutation(
        "a state counts that not all slices have",
        f"{CORE}/copy_ledger.py",
        "            if reached != state:\n",
        "            if reached.step != state.step:\n",
        Test(f"{LEDGER}::test_gradients_of_another_attempt_replace_those_that_were_dropped"),
    ),
    Mutation(
        "a gap in the log is stepped over",
        f"{CORE}/copy_ledger.py",
        "                if one.step != reached.step + 1:\n                    return False\n",
        "",
        Test(f"{LEDGER}::test_a_gap_in_the_log_leads_nowhere"),
    ),
    Mutation(
        "members change their seats when one is replaced",
        f"{CORE}/world.py",
        "tuple(seat or next(waiting) for seat in kept)",
        "tuple(members)",
        Test(f"{TESTS}/test_world.py::test_members_keep_their_seats_while_their_number_stays"),
    ),
    Mutation(
        "a keeper is in the failure domain of the member though another one is there",
        f"{CORE}/world.py",
        "        if world.seats[one].domain not in domains:\n",
        "        if one is not None:\n",
        Test(f"{TESTS}/test_world.py::test_a_keeper_is_in_another_failure_domain_where_there_is_one"),
    ),
    Mutation(
        "seats of an older formed world count",
        f"{CORE}/recovery_plan.py",
        "worlds[shard.world.number] = max(",
        "worlds[shard.world.number] = min(",
        Test(f"{TESTS}/test_commit_rule.py::test_members_lost_in_a_recovery_and_in_the_step_after_it"),
    ),
    Mutation(
        "the ranks of a member that are a step apart end it",
        "libs/keepstep/group/ranks/merging.py",
        "    if first.sharded:\n",
        "    if False:\n",
        Test(f"{SIMULATION}[no spares]"),
    ),
    Mutation(
        "a quorum forms without a member and its keeper, which hang",
        f"{QUORUM}/settling.py",
        "            self.verdict = waits\n",
        "            pass\n",
        SHARDS,
    ),
    Mutation(
        "a member that was cut off from the lighthouse with its keeper is not waited for",
        f"{QUORUM}/presence/health.py",
        "            groups.sources.silenced(group.replica_id, now)\n",
        "",
        SHARDS,
    ),
    Mutation(
        "keepers of which only others have told are not waited for",
        f"{QUORUM}/groups/shard_sources.py",
        "            if keeper not in self._of:\n                self._note(keeper, ())\n",
        "            pass\n",
        SHARDS,
    ),
    Mutation(
        "the lighthouse that takes over does not know the keepers",
        "libs/keepstep/session/lighthouse_session.py",
        "            self._send_shards()\n            deadline",
        "            deadline",
        Test(f"{SESSION}::test_the_next_lighthouse_gets_the_last_report_of_shards_before_the_open_request"),
    ),
    Mutation(
        "a quorum waits for members that are gone with their shards",
        f"{QUORUM}/groups/shard_sources.py",
        "for one in sources if one in alive",
        "for one in sources",
        SHARDS,
    ),
    Mutation(
        "a keeper without copies counts as a source of shards",
        f"{QUORUM}/shards.py",
        "[one for one in told.keepers if one not in without]",
        "told.keepers",
        SHARDS,
    ),
    Mutation(
        "a member and its keeper get the order to leave at once",
        f"{QUORUM}/job_state.py",
        "        if waits:\n",
        "        if False:\n",
        SHARDS,
    ),
    Mutation(
        "a member that waits for its order to leave is never told",
        f"{QUORUM}/settling.py",
        "            features.shards.let_leave()\n",
        "            pass\n",
        SHARDS,
    ),
    Mutation(
        "max_replicas leaves out a member and its keeper",
        f"{QUORUM}/forming/quorum_rules.py",
        "if too_many and not groups.sources.needs(group.replica_id, kept):",
        "if too_many:",
        SHARDS,
    ),
    Mutation(
        "a group that does not fit the mesh stops the others",
        f"{QUORUM}/forming/quorum_rules.py",
        "count if groups.multiple <= 1 else count - surplus(count, groups)",
        "count",
        SHARDS,
    ),
    Mutation(
        "a quorum forms that does not fit the mesh",
        f"{QUORUM}/shards.py",
        "if surplus(len(chosen), groups) or any",
        "if any",
        SHARDS,
    ),
    Mutation(
        "sources of shards of an older world count",
        f"{QUORUM}/shards.py",
        "            sources.begin(record.members if record.quorum_id == told.world else ())\n",
        "",
        SHARDS,
    ),
    Mutation(
        "shards count as lost although a second keeper has them",
        f"{CORE}/world.py",
        "if all(one in gone for one in keepers(world, seat, copies))",
        "if any(one in gone for one in keepers(world, seat, copies))",
        Test(f"{TESTS}/test_world.py::test_shards_are_lost_with_a_member_and_all_of_its_keepers"),
    ),
)
