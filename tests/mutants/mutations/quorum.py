"""Bugs in the quorum of a job: ``keepstep_lighthouse.quorum``."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Seeds, Test, Trace

LIGHTHOUSE = "services/keepstep_lighthouse"
SETTINGS = "tests/unit/keepstep_lighthouse/quorum/agreement/test_common_settings.py"
HEAL_ROUNDS = "tests/unit/keepstep_lighthouse/quorum/test_heal_rounds.py"
VERIFICATION = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[30_verify_replicas]"

REPORTS = "tests/unit/keepstep_lighthouse/quorum/test_step_reports.py"
SCENARIO = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says"
FINISHED = f"{SCENARIO}[32_finished_jobs_do_not_start_again]"
GOING_BACK = f"{SCENARIO}[33_going_back]"

VALUES = f"{SCENARIO}[52_values_of_optimizers]"

LOSSES = "tests/unit/keepstep_lighthouse/quorum/presence/test_losses.py"

MUTATIONS = (
    Mutation(
        "products of machines of different kinds are compared",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        '                return its if conditions == kind else ""\n',
        "                return its\n",
        Test(f"{SCENARIO}[57_products_of_machines]"),
    ),
    Mutation(
        "only members decide which product is right",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        ", members_decide=False)",
        ")",
        Test(f"{SCENARIO}[57_products_of_machines]"),
    ),
    Mutation(
        "groups on the machine of the lighthouse are refused if one of them uses loopback",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        "        if near.local and far.local:\n",
        "        if near.local and far.local and near.host == far.host:\n",
        Test(f"{SCENARIO}[26_layout]"),
    ),
    Mutation(
        "a loss that an operator ordered counts as a failure",
        f"{LIGHTHOUSE}/quorum/presence/departures.py",
        "in self._job.were_members and not ordered and not over:\n",
        "in self._job.were_members and not over:\n",
        Test(f"{LOSSES}::test_a_group_that_was_told_to_leave_is_no_failure"),
    ),
    Mutation(
        "the loss of a group that never trained counts as a failure",
        f"{LIGHTHOUSE}/quorum/presence/departures.py",
        "        if name_of(replica_id) in self._job.were_members and not ordered",
        "        if not ordered",
        Test(f"{LOSSES}::test_a_group_that_was_in_no_quorum_is_no_failure"),
    ),
    Mutation(
        "a group that is refused learns the step that the others come to after the end",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        "max(0, other.step - 1) if last",
        "other.step if last",
        Test(
            "tests/unit/keepstep_lighthouse/quorum/agreement/test_names_and_layouts.py"
            "::test_a_group_that_is_denied_learns_the_step_of_the_job"
        ),
    ),
    Mutation(
        "a group whose optimizers step with other values again is not refused",
        f"{LIGHTHOUSE}/quorum/agreement/step_reports.py",
        "and self._stepped_apart(group, key)]",
        "and not key]",
        Test(VALUES),
    ),
    Mutation(
        "of equally many groups, the values of those that connected last count",
        f"{LIGHTHOUSE}/quorum/agreement/step_reports.py",
        "-min(one.arrived",
        "min(one.arrived",
        Test(VALUES),
    ),
    Mutation(
        "a comparison of older weights clears a group of what its optimizers did since",
        f"{LIGHTHOUSE}/quorum/verification/divergence.py",
        "        if group.step == comparison.step:",
        "        if True:",
        Test(VALUES),
    ),
    Mutation(
        "a job is closed although a group has to heal",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "== (step, lineage) and not group.diverged\n",
        "== (step, lineage)\n",
        Test(VALUES),
    ),
    Mutation(
        "a job runs again when a request of a group that waits times out",
        f"{LIGHTHOUSE}/quorum/groups/groups.py",
        "        return 0.0 if self._waits_since is None else now - max(self._waits_since, self._clock_start)\n",
        "        first = self.first_asked()\n        return 0.0 if first is None else now - first\n",
        Test("tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[31_how_a_job_ends]"),
    ),
    Mutation(
        "a straggler is drained although the others have no weights",
        f"{LIGHTHOUSE}/quorum/stragglers.py",
        " and one.holds_newest()",
        "",
        Test("tests/unit/keepstep_lighthouse/quorum/test_stragglers.py::test_a_straggler_stays_when"),
    ),
    Mutation(
        "the highest quorum_id that a hello may report leaves no higher one that a hello may report",
        f"{LIGHTHOUSE}/quorum/presence/arrivals.py",
        "        if seen > max(limit, self._job.record.quorum_id):\n",
        "        if seen > limit:\n",
        Test(
            "tests/unit/keepstep_lighthouse/quorum/test_orders.py::"
            "test_the_highest_quorum_id_that_a_hello_may_report_does_not_refuse_the_groups_that_come_after_it"
        ),
    ),
    Mutation(
        "a quorum_id raised for a failed commit is not written",
        f"{LIGHTHOUSE}/quorum/forming/membership.py",
        "    job.persist(replace(begun, quorum_id=quorum_id, members=members, created_ms=created_ms))\n",
        "    job.record = replace(begun, quorum_id=quorum_id, members=members, created_ms=created_ms)\n"
        "    if not same:\n"
        "        job.persist(job.record)\n",
        Trace("a_quorum_id_raised_for_a_failed_commit_outlives_the_leader"),
    ),
    Mutation(
        "an eviction is not written",
        f"{LIGHTHOUSE}/quorum/orders.py",
        "incarnations, order, now_unix)\n        self._job.persist(record)\n",
        "incarnations, order, now_unix)\n        self._job.record = record\n",
        Trace("an_eviction_whose_write_is_lost_is_told_when_it_is_written"),
    ),
    Mutation(
        "members with the answer of an incomplete round are not told",
        f"{LIGHTHOUSE}/quorum/takeover.py",
        "        if self._lowest_asked is None or self._lowest_asked > self._held_step:\n",
        "        if self._held_step > -2:\n",
        Test(f"{SCENARIO}[24_lighthouse_died_while_it_announced]"),
    ),
    Mutation(
        "a takeover has no fence",
        f"{LIGHTHOUSE}/quorum/takeover.py",
        "        self._fenced_until = max(fenced_until, self._fenced_until)\n",
        "        self._fenced_until = 0.0\n",
        Trace("a_stranger_asks_the_next_leader"),
    ),
    Mutation(
        "a lighthouse does not raise quorum_id above the one that a group has seen",
        f"{LIGHTHOUSE}/quorum/presence/arrivals.py",
        "        if seen > self._job.record.quorum_id:\n",
        "        if seen < 0:\n",
        Test(
            "tests/scenarios/test_scenarios.py::"
            "test_the_lighthouse_decides_as_the_scenario_says[25_store_restored_from_a_backup]"
        ),
    ),
    Mutation(
        "a takeover has no grace",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "        if restarted and record.members and record.ended is None and record.closed is None:\n",
        "        if restarted and not record:\n",
        Trace("a_stranger_asks_the_next_leader"),
    ),
    Mutation(
        "a new leader waits for a group that hangs until the healthy ones give up",
        f"{LIGHTHOUSE}/quorum/takeover.py",
        "        self._began, self.interrupted = now, True\n",
        "        self._began = now\n",
        Test(
            "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[22_lighthouse_restart]"
        ),
    ),
    Mutation(
        "a refused connection counts although the group never answered",
        f"{LIGHTHOUSE}/quorum/presence/ports.py",
        "group.port.answered and ",
        "",
        Test(
            "tests/simulation/test_simulation.py::"
            "test_a_dead_group_is_lost_by_its_port_and_a_living_one_behind_a_firewall_is_not"
        ),
    ),
    Mutation(
        "a refused connection counts in a later session",
        f"{LIGHTHOUSE}/quorum/presence/ports.py",
        "group.port.answered and group.port.session == session\n",
        "group.port.answered\n",
        Test("tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[43_closed_port]"),
    ),
    Mutation(
        "a refused connection counts after one misled the lighthouse",
        f"{LIGHTHOUSE}/quorum/presence/ports.py",
        "            self._mislead = True\n",
        "",
        Test("tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[43_closed_port]"),
    ),
    Mutation(
        "a refused connection counts during a takeover",
        f"{LIGHTHOUSE}/quorum/presence/ports.py",
        "        if self._mislead or self._takeover.until is not None:\n",
        "        if self._mislead:\n",
        Test("tests/unit/keepstep_lighthouse/quorum/presence/test_ports.py::test_no_port_is_probed_during_a_takeover"),
    ),
    Mutation(
        "a group that moves to another lighthouse counts as lost",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "departures.move(group, now)",
        'departures.lose(group, "moved", now)',
        Test(
            "tests/unit/keepstep_lighthouse/quorum/presence/test_sessions.py::test_moving_to_another_lighthouse_is_no_loss"
        ),
    ),
    Mutation(
        "a cancelled request stays open",
        f"{LIGHTHOUSE}/quorum/requests.py",
        "request.request == number:\n        job.groups.withdraw(group)\n",
        "request.request == number:\n        pass\n",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "a quorum that lost a member between two rounds keeps its quorum_id",
        f"{LIGHTHOUSE}/quorum/forming/membership.py",
        "    goes_on = same and not failed and record.ended is None and not job.round.lost\n",
        "    goes_on = same and not failed and record.ended is None\n",
        Test(
            "tests/unit/keepstep_lighthouse/quorum/forming/test_rules.py::"
            "test_quorum_id_grows_with_another_membership_a_failed_commit_or_a_lost_member_and_else_stays"
        ),
    ),
    Mutation(
        "a quorum whose member reports a failed commit keeps its quorum_id",
        f"{LIGHTHOUSE}/quorum/forming/membership.py",
        "    failed = {one.commit_failures for one in requests} != {0}\n",
        "    failed = False\n",
        Seeds(1, 0, 500),
    ),
    Mutation(
        "a quorum is confirmed without the request of a member",
        f"{LIGHTHOUSE}/quorum/forming/quorum_rules.py",
        "groups.members_asking == quorum_size",
        "groups.members_asking >= quorum_size - 1",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "a quorum is smaller than min_replicas",
        f"{LIGHTHOUSE}/quorum/forming/quorum_rules.py",
        "max(1, policy.min_replicas, min_groups(groups))",
        "max(1, min_groups(groups))",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "an evicted group may come back",
        f"{LIGHTHOUSE}/quorum/presence/bans.py",
        "    if replica_id in record.evicted:\n",
        "    if not replica_id:\n",
        Trace("an_eviction_outlives_the_leader"),
    ),
    Mutation(
        "a readmission lifts the bans of longer names",
        f"{LIGHTHOUSE}/quorum/presence/bans.py",
        "if ban.target in (target, *incarnations)]",
        "if target in (ban.target, name_of(ban.target))]",
        Test(
            "tests/unit/keepstep_mesh/protocol/test_group_names.py::test_a_ban_and_its_readmission_reach_the_group_of_that_name_and_no_other"
        ),
    ),
    Mutation(
        "members do not hear of a lost member",
        f"{LIGHTHOUSE}/quorum/presence/departures.py",
        "        if sessions := self._job.member_sessions(lambda _: True):\n",
        "        if sessions := ():\n",
        Test(f"{SCENARIO}[02_killed_group]"),
    ),
    Mutation(
        "members that a quorum leaves out are not told",
        f"{LIGHTHOUSE}/quorum/settling.py",
        "        if left_behind:\n",
        "        if left_behind and not job.record:\n",
        Test("tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[15_healing]"),
    ),
    Mutation(
        "an answer that was lost with its connection is not repeated",
        f"{LIGHTHOUSE}/quorum/requests.py",
        "session is not None and request.request == answer.request:\n",
        "session is None:\n",
        Test(
            "tests/scenarios/test_scenarios.py::"
            "test_the_lighthouse_decides_as_the_scenario_says[05_answer_lost_with_the_connection]"
        ),
    ),
    Mutation(
        "a list that is not uniform keeps its version",
        f"{LIGHTHOUSE}/quorum/forming/announcing.py",
        "        if last is not None and last.uniform and uniform and same:\n",
        "        if last is not None and same:\n",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "groups with other settings train together",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        "agreed = [(_settings, self.settings)] + ([]",
        "agreed = [] + ([]",
        Test(
            f"{SETTINGS}::test_a_group_with_other_settings_is_denied_with_the_first_difference_and_nobody_waits_for_it"
        ),
    ),
    Mutation(
        "settings are compared only when parameters differ",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        "if (settings != self.settings and settings) or (",
        "if (",
        Test(f"{SETTINGS}::test_a_setting_that_only_one_of_two_versions_knows_is_a_difference"),
    ),
    Mutation(
        "half of the groups count as the majority of the first quorum",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        "if 2 * len(groups) > votes)",
        "if 2 * len(groups) >= votes)",
        Test(f"{SETTINGS}::test_two_groups_with_different_settings_are_both_refused_at_first"),
    ),
    Mutation(
        "a round heals although a member allows no heal",
        f"{LIGHTHOUSE}/quorum/forming/announcing.py",
        "            if not request.allow_heal:\n",
        "            if not request.allow_heal and request is first:\n",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "half of the roots count as a majority",
        f"{LIGHTHOUSE}/quorum/verification/comparisons.py",
        "return root if 2 * len(groups) > sum",
        "return root if 2 * len(groups) >= sum",
        Test(VERIFICATION),
    ),
    Mutation(
        "roots of different states are compared",
        f"{LIGHTHOUSE}/quorum/verification/comparisons.py",
        "        if _state(root) == (step, lineage):\n",
        "        if root.step <= step:\n",
        Test(VERIFICATION),
    ),
    Mutation(
        "a diverged group that missed its answer counts as healthy",
        f"{LIGHTHOUSE}/quorum/groups/groups.py",
        "        if group.diverged and (group.step, group.lineage) != (request.step, request.lineage):\n",
        "        if group.diverged:\n",
        Test(VERIFICATION),
    ),
    Mutation(
        "a diverged group heals again and again",
        f"{LIGHTHOUSE}/quorum/groups/open_heals.py",
        "progress.error:\n            group.diverged = False\n",
        "progress.error:\n            pass\n",
        Test(f"{HEAL_ROUNDS}::test_a_diverged_group_that_healed_may_ask_for_the_same_state_again"),
    ),
    Mutation(
        "a failed heal makes a diverged group sound",
        f"{LIGHTHOUSE}/quorum/groups/open_heals.py",
        "        if group.heal.progress.ended and not group.heal.progress.error:\n",
        "        if group.heal.progress.ended:\n",
        Test(f"{HEAL_ROUNDS}::test_a_diverged_group_that_healed_may_ask_for_the_same_state_again"),
    ),
    Mutation(
        "a quorum that groups heal before counts as a step",
        f"{LIGHTHOUSE}/quorum/groups/groups.py",
        "committed = not (failed or same_step or same_state)\n",
        "committed = not (failed or same_state)\n",
        Test(f"{HEAL_ROUNDS}::test_it_is_no_step_that_was_committed_or_failed"),
    ),
    Mutation(
        "a job that resumes keeps its quorum_id",
        f"{LIGHTHOUSE}/quorum/forming/membership.py",
        "    repeated = any(",
        "    repeated = False and any(",
        Test(
            "tests/unit/keepstep_lighthouse/quorum/groups/test_lineages.py::"
            "test_a_quorum_that_goes_on_from_a_state_that_begins_anew_gets_another_quorum_id"
        ),
    ),
    Mutation(
        "only the step shows whether a member received its answer",
        f"{LIGHTHOUSE}/quorum/requests.py",
        "where_it_was == (group.step, group.lineage) and session",
        "request.step <= answer.announce.step and session",
        Test(
            "tests/unit/keepstep_lighthouse/quorum/groups/test_lineages.py::"
            "test_a_member_above_the_step_of_an_answer_that_it_never_had_leaves_nobody_waiting"
        ),
    ),
    Mutation(
        "a finished job trains again",
        f"{LIGHTHOUSE}/quorum/finishing/starts.py",
        "    if step < finished - max(finished // FAR_BELOW, FEW_STEPS):\n",
        "    if step < 0:\n",
        Test(FINISHED),
    ),
    Mutation(
        "a group one step below those that finished is refused",
        f"{LIGHTHOUSE}/quorum/finishing/starts.py",
        "finished - max(finished // FAR_BELOW, FEW_STEPS)",
        "finished - finished // FAR_BELOW",
        Test(FINISHED),
    ),
    Mutation(
        "the step at which a group finished is not written",
        f"{LIGHTHOUSE}/quorum/presence/departures.py",
        "            self._job.persist(replace(self._job.record, finished_step=said.step))\n",
        "            self._job.record = replace(self._job.record, finished_step=said.step)\n",
        Test(FINISHED),
    ),
    Mutation(
        "the end of a job is not written",
        f"{LIGHTHOUSE}/quorum/presence/departures.py",
        "        self._job.persist(replace(record, step=step, ended=JobEnd(code, step, now_unix, why)))\n",
        "        self._job.record = replace(record, step=step, ended=JobEnd(code, step, now_unix, why))\n",
        Test(FINISHED),
    ),
    Mutation(
        "a step that one group committed and the others did not counts as going back",
        f"{LIGHTHOUSE}/quorum/finishing/starts.py",
        "    if announce.step >= job.reached - usual:\n",
        "    if announce.step >= job.reached:\n",
        Test(GOING_BACK),
    ),
    Mutation(
        "the first group that starts again decides that the job goes back",
        f"{LIGHTHOUSE}/quorum/forming/quorum_rules.py",
        "    return record.policy.refuse_going_back and not any(group.member for group in groups)\n",
        "    return False\n",
        Test(GOING_BACK),
    ),
    Mutation(
        "a member that changes its parameters is denied before the others have asked",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        "[] if group.member else [(_layout, self.layout)]",
        "[(_layout, self.layout)]",
        Test(f"{SCENARIO}[51_layout_that_changes]"),
    ),
    Mutation(
        "groups that are behind decide which parameters are right",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        "[group for group in members if group.step == newest] or known",
        "members or known",
        Test(f"{SCENARIO}[51_layout_that_changes]"),
    ),
    Mutation(
        "without a majority the parameters before do not count",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        'without_majority = agreed if agreed in sides else ""',
        'without_majority = ""',
        Test(f"{SCENARIO}[51_layout_that_changes]"),
    ),
    Mutation(
        "only settings are compared in the first quorum",
        f"{LIGHTHOUSE}/quorum/agreement/agreements.py",
        "        self.layout, layout_denied = self._settle(_layout, self.layout)\n",
        "        layout_denied = False\n",
        Test(f"{SCENARIO}[26_layout]"),
    ),
    Mutation(
        "fewer collectives in a failed step count as a difference",
        f"{LIGHTHOUSE}/quorum/agreement/step_reports.py",
        "            if completed is not None and report.collectives > completed.collectives:\n",
        "            if completed is not None and report.collectives != completed.collectives:\n",
        Test(f"{REPORTS}::test_a_step_that_failed_with_no_more_collectives_proves_nothing"),
    ),
    Mutation(
        "a job that went back keeps the steps of its first NaN",
        f"{LIGHTHOUSE}/quorum/settling.py",
        "            features.reports.went_back(announce.step)\n",
        "            pass\n",
        Test(f"{REPORTS}::test_a_nan_in_a_step_that_comes_again_after_the_job_went_back_is_named_too"),
    ),
    Mutation(
        "a single difference in collectives ends a group",
        f"{LIGHTHOUSE}/quorum/agreement/step_reports.py",
        "                repeated = not self._differed.isdisjoint(began)\n",
        "                repeated = True\n",
        Test(f"{REPORTS}::test_a_single_difference_is_named_and_ends_no_group"),
    ),
    Mutation(
        "every group with a NaN is named as its origin",
        f"{LIGHTHOUSE}/quorum/agreement/step_reports.py",
        "        return not follows\n",
        "        return True\n",
        Test(f"{REPORTS}::test_only_the_group_with_the_first_nan_is_named_and_every_contribution_is_counted"),
    ),
)
