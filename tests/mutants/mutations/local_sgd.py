"""Bugs in LocalSGD and DiLoCo: ``keepstep.local_sgd``."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test

NUMBERS = "tests/unit/keepstep/local_sgd/test_numbers.py"
REAL_NUMBERS = "tests/services/manager/local_sgd/test_numbers_of_groups.py"
BLOCKS = "tests/unit/keepstep/local_sgd/test_blocks.py"
STATES = "tests/unit/keepstep/local_sgd/test_block_states.py"
GROUPS = "tests/services/manager/local_sgd/test_groups.py"

MERGES = (
    "tests/unit/keepstep/local_sgd/test_decoupled.py::test_decoupled_groups_train_the_numbers_of_a_plain_computation"
)

MUTATIONS = (
    Mutation(
        "a group that catches up loses what it trained",
        "libs/keepstep/local_sgd/merged_fragment.py",
        "local.add_(saved[name].to(local.device) - before.to(local.device))",
        "local.copy_(saved[name])",
        Test(MERGES),
    ),
    Mutation(
        "a contribution that other groups committed is merged twice",
        "libs/keepstep/local_sgd/merged_fragment.py",
        "self._contributed = doubt.parameters",
        "pass",
        Test(MERGES),
    ),
    Mutation(
        "a contribution keeps its weight after the merge",
        "libs/keepstep/local_sgd/merged_fragment.py",
        "self.weight -= doubt.weight",
        "pass",
        Test(MERGES),
    ),
    Mutation(
        "an outer optimizer steps other fragments with the gradients of the inner one",
        "libs/keepstep/local_sgd/outer_optimizer.py",
        "                parameter.grad = None\n",
        "                pass\n",
        Test(f"{NUMBERS}::test_diloco_trains_the_numbers_of_a_plain_computation"),
    ),
    Mutation(
        "a fragment keeps its own parameters when its outer step fails",
        "libs/keepstep/local_sgd/fragment.py",
        "            self._restore()\n            with self._manager.committing() as committed:\n",
        "            with self._manager.committing() as committed:\n                committed and self._restore()\n",
        Test(f"{REAL_NUMBERS}::test_two_groups_train_the_numbers_of_a_plain_computation[plain]"),
    ),
    Mutation(
        "the parameters are merged before the originals are kept",
        "libs/keepstep/local_sgd/fragment.py",
        "                    self._keep_originals()\n                    self._merge(trained)\n",
        "                    self._merge(trained)\n                    self._keep_originals()\n",
        Test(f"{BLOCKS}::test_the_result_of_an_outer_step_is_merged_by_alpha"),
    ),
    Mutation(
        "a codec keeps the error feedback of a failed outer step",
        "libs/keepstep/local_sgd/fragment.py",
        "self._codec.settle(self._key, committed)",
        "self._codec.settle(self._key, True)",
        Test(f"{BLOCKS}::test_a_codec_averages_a_fragment_at_once_and_is_told_whether_its_result_is_used"),
    ),
    Mutation(
        "the quorum that a group heals in stays open for its first period",
        "libs/keepstep/local_sgd/outer_steps.py",
        "            self._manager.steps.cancel()  # the first outer step has a quorum of its own",
        "            pass  # the first outer step has a quorum of its own",
        Test(f"{GROUPS}::test_a_group_that_starts_a_moment_later_is_in_the_first_outer_step[diloco]"),
    ),
    Mutation(
        "a group that joins begins a period of its own",
        "libs/keepstep/local_sgd/outer_steps.py",
        'self._schedule.position = int(state["position"])',
        "self._schedule.position = 0",
        Test(f"{STATES}::test_a_state_is_loaded_before_the_block_and_training_goes_on_as_before"),
    ),
    Mutation(
        "weights that differ by design are compared",
        "libs/keepstep/local_sgd/outer_steps.py",
        "        manager.compare_only(compared)\n",
        "",
        Test(f"{BLOCKS}::test_groups_compare_all_settings_parameters_and_outer_optimizers"),
    ),
    Mutation(
        "a step that a fused optimizer skips counts",
        "libs/keepstep/local_sgd/outer_steps.py",
        "        if found_inf is not None and found_inf.item():\n            return\n",
        "",
        Test(f"{BLOCKS}::test_a_step_that_the_grad_scaler_skips_does_not_count[True]"),
    ),
    Mutation(
        "a group that heals in sync() averages with groups that do not",
        "libs/keepstep/local_sgd/parameter_average.py",
        "        if not self._schedule.begins:\n",
        "        if False:\n",
        Test(f"{BLOCKS}::test_a_sync_that_heals_from_a_group_that_begins_its_period_averages_nothing"),
    ),
)
