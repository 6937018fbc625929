"""Bugs in ``elastic_data``: which samples a step takes."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test

ROOM = "libs/keepstep/elastic_data"
GROUPS = "tests/services/manager/test_elastic_data.py"
DYING = (
    f"{GROUPS}::test_groups_that_die_and_come_back_train_every_sample_once_and_reach_the_weights_of_one_process[async]"
)
EPOCHS = "tests/services/manager/test_epochs.py"
AHEAD = f"{GROUPS}::test_worker_processes_load_ahead_and_a_spoilt_step_is_repeated_with_the_same_samples"

MUTATIONS = (
    Mutation(
        "a loader yields a batch that it loaded for a later step",
        f"{ROOM}/elastic_loader.py",
        "            if plan.planned.popleft() == wanted:\n",
        "            if plan.planned.popleft():\n",
        Test(AHEAD),
    ),
    Mutation(
        "the shares of a step are those of the groups of the first quorum",
        f"{ROOM}/elastic_sampler.py",
        "            self._groups = (manager.participating_rank() or 0, max(1, manager.num_participants()))\n",
        "            self._groups = self._groups if self._share else (manager.participating_rank(), 3)\n",
        Test(DYING),
    ),
    Mutation(
        "a rank with more samples than others counts as much as they do",
        f"{ROOM}/shares.py",
        "        return Share(at, start, stop, (stop - start) * ranks / total)\n",
        "        return Share(at, start, stop, 1.0)\n",
        Test(f"{GROUPS}::test_the_losses_are_those_of_one_process_with_any_number_of_groups_and_ranks[3-1]"),
    ),
    Mutation(
        "the ranks of a group take the same samples",
        f"{ROOM}/elastic_sampler.py",
        "        return self._batches.share(at, group * self._num_ranks + self._rank, groups * self._num_ranks)\n",
        "        return self._batches.share(at, group, groups)\n",
        Test(f"{GROUPS}::test_the_losses_are_those_of_one_process_with_any_number_of_groups_and_ranks[2-2]"),
    ),
    Mutation(
        "the position moves on after a step that was discarded",
        f"{ROOM}/elastic_sampler.py",
        "        return self._batches.advance(self._base, step - self._base_step)\n",
        "        return self._batches.advance(self._base, (self._drawn or 1) - 1)\n",
        Test(AHEAD),
    ),
    Mutation(
        "a loop ends its epoch where a heal goes on in another one",
        f"{ROOM}/elastic_sampler.py",
        "            if self._ended_epoch() or self._manager.steps.groups_finish:\n",
        "            if self._share and self._share.position.epoch != self.epoch "
        "or self._manager.steps.groups_finish:\n",
        Test(f"{EPOCHS}::test_a_group_that_heals_in_another_epoch_goes_on_in_it[async-from a checkpoint-with_epochs]"),
    ),
    Mutation(
        "code of an epoch that runs after a heal with the final state keeps its effect",
        f"{ROOM}/elastic_sampler.py",
        "                self._manager.mark_torn()\n",
        "                pass\n",
        Test(f"{EPOCHS}::test_a_group_that_heals_while_the_others_finish_runs_no_code_of_an_epoch_with_effect"),
    ),
)
