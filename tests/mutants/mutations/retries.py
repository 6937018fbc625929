"""Bugs in steps that are repeated after a loss: ``retry_allreduce``."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test

LIGHTHOUSE = "services/keepstep_lighthouse/quorum/retries.py"
RETRIES = "libs/keepstep/step/retries.py"
RETRYING = "libs/keepstep/step/retrying"
STEPS = "tests/services/manager/steps/test_retried_steps.py"
A_FEW_TIMES = f"{STEPS}::test_a_step_is_retried_a_few_times_and_then_discarded[3]"
SCENARIO = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[48_retried_steps]"
SIMULATION = (
    "tests/simulation/test_simulation.py::test_a_group_that_was_behind_does_not_retry_with_gradients_of_other_weights"
)

MUTATIONS = (
    Mutation(
        "a retry of a step that another group has committed is answered",
        "services/keepstep_lighthouse/quorum/retries.py",
        "    if verdict.code in ANNOUNCING and _deny_late(job):\n",
        "    if verdict.code == 'grace' and _deny_late(job):\n",
        Test(SCENARIO),
    ),
    Mutation(
        "a retry of a group that follows the others is denied, as if they had committed the step",
        LIGHTHOUSE,
        "    lineages = {lineage, following(lineage)} if heals else {lineage}\n",
        "    lineages = {lineage}\n",
        Test(SCENARIO),
    ),
    Mutation(
        "a group that was behind retries with gradients of other weights",
        f"{RETRYING}/retry_rules.py",
        "    if failed.behind:\n",
        "    if failed.behind and failed.retries:\n",
        Test(SIMULATION),
    ),
    Mutation(
        "a retry waits for joiners when too few members are left",
        LIGHTHOUSE,
        '        if verdict.code == "min_replicas":\n',
        '        if verdict.code == "grace":\n',
        Test(SCENARIO),
    ),
    Mutation(
        "a retried step reduces what the failed one left in the tensors",
        f"{RETRYING}/kept_reductions.py",
        "                tensor.copy_(copy)\n",
        "                pass\n",
        Test(A_FEW_TIMES),
    ),
    Mutation(
        "a retried step averages the buffers for the groups of the failed one",
        f"{RETRYING}/kept_reductions.py",
        "            self.reduction.refill()\n",
        "            pass\n",
        Test(f"{STEPS}::test_buffers_are_those_of_the_groups_that_are_left"),
    ),
    Mutation(
        "gradients are reduced again that changed while they were reduced",
        f"{RETRYING}/kept_reductions.py",
        '        return "" if _version(tensor) == self._version else CHANGED\n',
        '        return ""\n',
        Test(f"{STEPS}::test_a_gradient_that_was_changed_while_it_was_reduced_keeps_the_step_from_being_retried"),
    ),
    Mutation(
        "the script sees gradients of a reduction that is repeated later",
        RETRIES,
        "        if not at_end_of_backward(self.finalize):\n",
        "        if False:\n",
        Test(f"{STEPS}::test_a_script_may_use_its_gradients_before_the_commit"),
    ),
    Mutation(
        "a rank gives its script the gradients that another rank of its group reduces again",
        RETRIES,
        "        if not self._context.ranks.all_ready(succeeded, advice=NO_PIPELINE):\n",
        "        if not succeeded:\n",
        Test(f"{STEPS}::test_groups_of_two_ranks_use_gradients_without_the_part_of_a_rank_whose_group_is_lost"),
    ),
    Mutation(
        "a rank waits in its backward pass for a rank that has left the step",
        "libs/keepstep/group/ranks/gathering.py",
        "            if decided or self._barrier.has_ended(cast):\n",
        "            if decided:\n",
        Test(
            "tests/unit/keepstep/group/test_group_core.py::"
            "test_a_rank_does_not_wait_in_a_poll_that_another_rank_has_left_for_the_next_vote"
        ),
    ),
    Mutation(
        "a group of several ranks repeats a step although the script of one has seen a result",
        RETRIES,
        "            self._kept.refuse(HANDED_OUT)\n        return",
        "            pass\n        return",
        Test(f"{STEPS}::test_a_group_of_several_ranks_does_not_repeat_an_all_reduce_that_its_script_has_waited_for"),
    ),
    Mutation(
        "a step is repeated although the script has seen results of it",
        RETRIES,
        "            self._kept.refuse(HANDED_OUT)\n        except",
        "            pass\n        except",
        Test(f"{STEPS}::test_results_that_the_script_has_seen_keep_the_step_from_being_retried"),
    ),
    Mutation(
        "a step is repeated with a batch that was drawn by the number of the group",
        "libs/keepstep/manager.py",
        "            self._context.kept.refuse(BATCH_BY_NUMBER)\n",
        "            pass\n",
        Test(f"{STEPS}::test_a_batch_that_was_drawn_by_the_number_of_the_group_keeps_the_step_from_being_retried"),
    ),
    Mutation(
        "a rank retries although another rank of its group cannot",
        RETRIES,
        "        ready = context.ranks.all_ready(not why_not)\n",
        "        ready = not why_not\n",
        Test(f"{STEPS}::test_all_ranks_of_a_group_retry_or_none_does"),
    ),
    Mutation(
        "a step is retried more often than the limit",
        f"{RETRYING}/retry_rules.py",
        "    if failed.retries >= MAX_RETRIES:\n",
        "    if failed.retries > MAX_RETRIES:\n",
        Test(f"{STEPS}::test_a_step_is_retried_a_few_times_and_then_discarded[4]"),
    ),
    Mutation(
        "a group retries after an error of its own",
        f"{RETRYING}/retry_rules.py",
        "    if failed.own_error:\n",
        "    if failed.own_error and failed.behind:\n",
        Test(f"{STEPS}::test_an_error_of_the_group_itself_discards_the_step"),
    ),
    Mutation(
        "a slow rank does not learn the no of the others, who poll already",
        "libs/keepstep/group/ranks/merging.py",
        "        if key == self._refused:\n",
        "        if key == self._refused and vote.poll:\n",
        Test(
            "tests/unit/keepstep/group/test_group_core.py::test_a_slow_rank_learns_the_no_after_the_others_have_polled"
        ),
    ),
)
