"""Bugs in the worker library: ``keepstep``."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Seeds, Test, Trace

BUFFERS = "tests/services/manager/models/test_synced_buffers.py"
GROUPS = "tests/services/manager/agreement/test_verification.py"
SHARDED = "tests/services/manager/models/test_sharded_models.py"
SYNCHRONIZED = "tests/services/manager/agreement/test_synchronized.py"
HISTORIES = "tests/unit/keepstep_mesh/protocol/test_lineage_model.py::test_no_short_history_breaks_a_rule"
CHANGES = "tests/services/manager/steps/test_commit_and_change.py"
ABANDONED = "tests/services/manager/steps/test_abandoned_steps.py"

PLANS = "tests/unit/keepstep/group/test_quorum_plan.py"
JOINS = "tests/services/manager/test_catching_up.py"
LINK = "tests/unit/keepstep/relay_client/test_relay_link.py"
UPLOADING = "tests/unit/keepstep/relay_client/test_uploading.py"
RELAY = "tests/unit/keepstep_relay/core/test_relay_core.py"

MUTATIONS = (
    Mutation(
        "a group without weights heals in every step, and its source copies the state each time",
        "libs/keepstep/group/quorum_plan.py",
        "            healing = tuple(rank for rank in healing if rank not in followers)\n",
        "",
        Test(f"{PLANS}::test_a_group_that_follows_neither_heals_nor_counts_nor_is_a_source"),
    ),
    Mutation(
        "a group goes on following after a step that the others did not take",
        "libs/keepstep/group/quorum_plan.py",
        "(members[rank].step, members[rank].lineage) == here)",
        "members[rank].lineage == here[1])",
        Test(f"{PLANS}::test_a_group_that_followed_other_steps_than_the_others_took_heals"),
    ),
    Mutation(
        "a state that a group does not have is worth as much as one that it has",
        "libs/keepstep_mesh/protocol/lineage.py",
        "        return Soundness.FOLLOWING\n",
        "        return Soundness.SOUND\n",
        Test(f"{PLANS}::test_a_group_that_follows_heals_where_groups_finish_and_any_state_is_worth_more_than_none"),
    ),
    Mutation(
        "the job goes on from a worse state than the one of a group that follows others which are gone",
        "libs/keepstep/step/catching_up/gradient_log.py",
        "        return held is not None and (is_following(reference.lineage) or worth(held) > worth(reference))\n",
        "        return False\n",
        Seeds(1, 5070, 20),
    ),
    Mutation(
        "a group that has caught up keeps the buffers of the state that it loaded",
        "libs/keepstep/step/catching_up/catch_up.py",
        "            self._last[2]()  # the state that was loaded has the buffers of the base\n",
        "            pass\n",
        Test(f"{JOINS}::test_a_catch_up_that_fails_begins_again_and_the_end_waits_for_it"),
    ),
    Mutation(
        "the schedule of the learning rate is not replayed",
        "libs/keepstep/optim.py",
        "            return self._follower.advance(self._step)\n",
        "            return self._follower.advance(lambda: self.optim.step() and None)\n",
        Test(f"{JOINS}::test_a_group_that_catches_up_is_equal_bit_for_bit"),
    ),
    Mutation(
        "weights of a replay that were not compared count as those of the others",
        "libs/keepstep/step/catching_up/gradient_log.py",
        "        lineage = step.lineage if self._doubted is None else self._doubted\n",
        "        lineage = step.lineage\n",
        Test(
            "tests/unit/keepstep/step/test_gradient_log.py::test_weights_of_a_replay_in_doubt_have_a_lineage_of_their_own"
        ),
    ),
    Mutation(
        "groups at an equal step count as equal in any lineage",
        "libs/keepstep/group/quorum_plan.py",
        "(m.step, m.lineage) == (step, lineage)",
        "m.step == step",
        Trace("two_groups_at_an_equal_step_with_different_weights"),
    ),
    Mutation(
        "a trainer does not send its settings",
        "libs/keepstep/step/asks.py",
        "            settings=self._compared.settings,\n            last_step",
        "            last_step",
        Test(
            "tests/services/manager/agreement/test_agreement.py::"
            "test_of_three_groups_the_one_with_another_setting_is_refused_and_the_others_go_on_equal[init_sync]"
        ),
    ),
    Mutation(
        "the divisor follows the group's policy of healing, not the round's",
        "libs/keepstep/step/step_quorum.py",
        "        self.allow_heal = plan.allow_heal and (rules.allow_heal or plan.finishing)\n",
        "",
        Test(
            "tests/services/manager/agreement/test_agreement.py::"
            "test_all_members_take_one_divisor_in_a_round_in_which_only_one_of_them_allows_no_heal"
        ),
    ),
    Mutation(
        "every float buffer is averaged",
        "libs/keepstep/data_parallel/synced_buffers.py",
        "elif averaged or _is_running_statistic(owner, attribute):",
        "elif averaged or tensor.is_floating_point():",
        Test(f"{BUFFERS}::test_constants_of_every_dtype_stay_as_they_are_bit_for_bit[DistributedDataParallel]"),
    ),
    Mutation(
        "statistics of frozen layers are averaged",
        "libs/keepstep/data_parallel/synced_buffers.py",
        "if buffer.owner.training else",
        "if buffer.owner else",
        Test(f"{BUFFERS}::test_statistics_of_a_norm_that_does_not_train_stay_bit_for_bit"),
    ),
    Mutation(
        "the treatment of buffers is not compared",
        "libs/keepstep/data_parallel/synced_buffers.py",
        "{self.dtype} {self.treatment.value}",
        "{self.dtype}",
        Test(f"{BUFFERS}::test_a_group_that_treats_a_buffer_in_another_way_is_refused[averaged]"),
    ),
    Mutation(
        "a source that abandons a step does not refuse its joiners",
        "libs/keepstep/step/attempt.py",
        "        self.refuse_joiners(reason)\n        self.present.succeeded()\n",
        "        self.present.succeeded()\n",
        Test(f"{ABANDONED}::test_a_source_that_begins_another_step_refuses_its_joiner_at_once"),
    ),
    Mutation(
        "a source serves all joiners at once",
        "libs/keepstep/transfer/direct/sending/admission.py",
        "            if self.ahead(reader) >= self._at_once - self._working(now):\n",
        "            if self.ahead(reader) < 0:\n",
        Test("tests/unit/keepstep/transfer/test_admission.py::test_the_next_has_a_turn_when_one_ends"),
    ),
    Mutation(
        "a group that trains behind keeps its lineage",
        "libs/keepstep/step/progress.py",
        "        elif not self._has_own_lineage():\n",
        "        elif self.step < 0:\n",
        Test(HISTORIES),
    ),
    Mutation(
        "a group that trains behind gets the lineage of the others",
        "libs/keepstep/step/step_end.py",
        "progress.commit(plan.quorum_id, self.participants, behind=behind)",
        "progress.commit(plan.quorum_id, self.participants, behind=False)",
        Test(f"{SYNCHRONIZED}::test_groups_that_do_not_say_so_are_not_equal_and_heal_next_time"),
    ),
    Mutation(
        "a synchronized group keeps its count of batches",
        "libs/keepstep/step/step_end.py",
        "batches = (plan.reference_batches if behind else 0) or progress",
        "batches = progress",
        Test(f"{SYNCHRONIZED}::test_groups_that_say_that_they_are_equal_are_and_nobody_heals"),
    ),
    Mutation(
        "groups count a peer that cannot heal before the forward pass",
        "libs/keepstep/step/step_quorum.py",
        "(rules.first_step and plan.first_step)\n",
        "(rules.first_step and plan.max_step == 0)\n",
        Test(f"{SYNCHRONIZED}::test_beside_groups_that_begin_a_diverged_one_counts_in_no_average"),
    ),
    Mutation(
        "a group whose heal failed forgets its divergence",
        "libs/keepstep/step/step_quorum.py",
        "                context.diverge()\n",
        "                pass\n",
        Test(f"{GROUPS}::test_a_heal_that_fails_leaves_a_group_that_nobody_takes_for_healthy"),
    ),
    Mutation(
        "the state after a failed step is compared",
        "libs/keepstep/step/attempt.py",
        "        if self.error is None:  # else BatchNorm's",
        "        if True:  # else BatchNorm's",
        Test(f"{GROUPS}::test_the_state_after_a_failed_step_is_not_compared"),
    ),
    Mutation(
        "a relay that is away counts as one that does not have the bytes",
        "libs/keepstep/relay_client/relay_link.py",
        "                if isinstance(error, TransferError) and not _passes(",
        "                if not _passes(",
        Test(f"{LINK}::test_a_relay_that_is_away_may_have_what_the_others_do_not_have"),
    ),
    Mutation(
        "an upload that another rank has aborted is begun again",
        "libs/keepstep/relay_client/uploading.py",
        "        self._begun, self._again = True, False  # what another rank has aborted since is not begun again\n",
        "        self._begun = True\n",
        Test(f"{UPLOADING}::test_an_upload_that_another_rank_aborts_while_chunks_are_sent_is_not_begun_again"),
    ),
    Mutation(
        "a rank of an open checkpoint that has reported need not keep it alive",
        "services/keepstep_relay/core/machine.py",
        "        if one.facts.stays_open:\n            return []\n",
        "",
        Test(f"{RELAY}::test_a_rank_of_an_open_checkpoint_that_has_reported_keeps_it_alive_too"),
    ),
    Mutation(
        "a group that comes after the end loads another state than the final one",
        "libs/keepstep/checkpoint/managed/newest_checkpoint.py",
        "(one.step, one.quorum_id) == (step, quorum_id))",
        "one.step <= step)",
        Test(
            "tests/services/manager/steps/test_finish.py::"
            "test_a_group_that_comes_after_the_end_takes_a_published_final_state_from_a_relay"
        ),
    ),
    Mutation(
        "rank 0 omits a member list that has changed",
        "libs/keepstep/group/ranks/rank_lists.py",
        "        if known == self._number:\n",
        "        if known:\n",
        Test("tests/unit/keepstep/group/test_rank_lists.py::test_a_changed_list_is_sent_once_on_every_connection"),
    ),
    Mutation(
        "a member stores a short address that older members cannot read",
        "libs/keepstep/step/reconfigurer.py",
        "        version = min(member.info.rendezvous for member in plan.members)\n",
        "        version = max(member.info.rendezvous for member in plan.members)\n",
        Test(
            "tests/unit/keepstep/rendezvous/test_rendezvous_size.py::test_addresses_are_short_when_every_member_can_read_them"
        ),
    ),
    Mutation(
        "a signal interrupts the change of the weights after a commit",
        "libs/keepstep/step/attempt.py",
        "            self._context.signals.hold()\n",
        "            pass\n",
        Test(f"{CHANGES}::test_a_signal_between_commit_and_change_is_handled_right_after_the_change"),
    ),
    Mutation(
        "a group whose optimizer failed after the commit counts as equal to the others",
        "libs/keepstep/manager.py",
        "            if context.signals.holding:  # the step counts, and no other group has these weights\n",
        "            if context.state.readable:\n",
        Test(f"{CHANGES}::test_an_error_of_an_optimizer_after_the_commit_makes_the_group_heal"),
    ),
    Mutation(
        "a wrapped optimizer that failed after a bare commit goes unnoticed",
        "libs/keepstep/lifecycle/steps.py",
        "            if not context.progress.torn:\n",
        "            if context.progress.torn:\n",
        Test(f"{CHANGES}::test_an_error_of_an_optimizer_after_the_commit_makes_the_group_heal[should_commit]"),
    ),
    Mutation(
        "an error of the script ends the group although steps committed in between",
        "libs/keepstep/step/evidence/repeated_error.py",
        "        self._count = self._count + 1 if last is not None and own.is_same(last) else 1\n",
        "        self._count += 1\n",
        Test(
            "tests/unit/keepstep/step/test_repeated_error.py::test_steps_that_commit_or_fail_for_another_reason_do_not"
        ),
    ),
    Mutation(
        "groups average other sharded modules than each other in silence",
        "libs/keepstep/script_checks/common_values.py",
        "        self._reductions.append(what)\n",
        "        self._reductions.append('')\n",
        Test(f"{SHARDED}::test_a_group_whose_steps_use_another_expert_of_the_same_size_is_refused_with_both_names"),
    ),
    Mutation(
        "the ranks of a group wait for each other for ever after one of its torchruns was replaced",
        "libs/keepstep/runtime/environment.py",
        ' and launchers == "1" else 0\n',
        " else 0\n",
        Test(
            "tests/unit/keepstep/runtime/test_environment.py"
            "::test_counts_of_several_torchruns_of_one_group_are_not_compared"
        ),
    ),
)
