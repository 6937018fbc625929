"""Mistakes that a stored test must catch: each a small change of the source that breaks one rule, and what catches it.

``make mutants`` makes each of them in a copy, runs its check and demands that it fails. A check is a stored trace of
``simulation.traces``, seeds of a simulation, or a test by its id.
"""

from __future__ import annotations

from dataclasses import dataclass

LIGHTHOUSE = "services/keepstep_lighthouse"
MESH = "libs/keepstep_mesh"
SETTINGS = "tests/unit/quorum/test_core_settings.py"
BUFFERS = "tests/services/manager/models/test_synced_buffers.py"
GROUPS = "tests/services/manager/agreement/test_verification.py"
SYNCHRONIZED = "tests/services/manager/agreement/test_synchronized.py"
HISTORIES = "tests/unit/lighthouse/test_lineage_model.py::test_no_short_history_breaks_a_rule"
ABANDONED = "tests/services/manager/steps/test_abandoned_steps.py"
HEAL_ROUNDS = "tests/unit/quorum/test_core_heal_rounds.py"
VERIFICATION = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[30_verify_replicas]"


@dataclass(frozen=True)
class Trace:
    name: str

    def __str__(self) -> str:
        return f"trace {self.name}"


@dataclass(frozen=True)
class Seeds:
    """The first of them that fails is enough."""

    lighthouses: int
    first: int
    count: int

    def __str__(self) -> str:
        kind = "one lighthouse" if self.lighthouses == 1 else "failover"
        return f"seeds {self.first} to {self.first + self.count - 1}, {kind}"


@dataclass(frozen=True)
class Test:
    id: str

    def __str__(self) -> str:
        return self.id.removeprefix("tests/")


Check = Trace | Seeds | Test


@dataclass(frozen=True)
class Mutation:
    """``name``: what is broken, in the words of the rules. ``old`` occurs once in ``file``; ``new`` takes its place."""

    name: str
    file: str
    old: str
    new: str
    check: Check


MUTATIONS = (
    # ---- what broke the first draft of the rules
    Mutation(
        "a quorum_id raised for a failed commit is not written",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "        state.persist(replace(record, quorum_id=quorum_id, members=members, created_ms=created_ms))\n",
        "        state.record = replace(record, quorum_id=quorum_id, members=members, created_ms=created_ms)\n"
        "        if not same:\n"
        "            state.persist(state.record)\n",
        Trace("a_quorum_id_raised_for_a_failed_commit_outlives_the_leader"),
    ),
    Mutation(
        "a deposed leader renews its lease object",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "                await self._store.keep_alive(self._lease)\n"
        "                self._heard(await self._store.get(LEADER_KEY))\n",
        "                await self._store.keep_alive(self._lease)\n",
        Trace("a_deposed_leader_that_hears_of_nothing_stops_before_its_lease_ends"),
    ),
    Mutation(
        "a leader goes on after a write of unknown outcome",
        f"{LIGHTHOUSE}/leadership/term.py",
        "                unknown = unknown or isinstance(error, OutcomeUnknownError | TimeoutError)\n",
        "                if isinstance(error, OutcomeUnknownError):\n"
        "                    return\n"
        "                unknown = False\n",
        Trace("a_write_of_a_quorum_that_is_lost"),
    ),
    Mutation(
        "what became of a write of unknown outcome is not read back",
        f"{LIGHTHOUSE}/leadership/term.py",
        "                unknown = unknown or isinstance(error, OutcomeUnknownError | TimeoutError)\n",
        "                unknown = False\n",
        Trace("a_write_of_a_quorum_that_is_done"),
    ),
    Mutation(
        "an eviction is not written",
        f"{LIGHTHOUSE}/quorum/changes/orders.py",
        "    record = bans.evict(state.record, incarnations, order, now_unix)\n    state.persist(record)\n",
        "    record = bans.evict(state.record, incarnations, order, now_unix)\n    state.record = record\n",
        Trace("an_eviction_whose_write_is_lost_is_told_when_it_is_written"),
    ),
    Mutation(
        "who holds the answer of a round that only some members heard of is not told",
        f"{LIGHTHOUSE}/quorum/takeover.py",
        "        if self._lowest_asked is None or self._lowest_asked > self.held_step:\n",
        "        if self.held_step > -2:\n",
        Trace("a_round_that_only_some_members_heard_of"),
    ),
    Mutation(
        "a cut-off leader keeps its sessions",
        f"{LIGHTHOUSE}/jobs/lighthouse_node.py",
        "            session.end(reason, websocket.CLOSE_GOING_AWAY)\n",
        "            pass\n",
        Trace("a_leader_that_is_cut_off_closes_its_sessions"),
    ),
    Mutation(
        "groups at an equal step count as equal, whatever their lineage",
        "libs/keepstep/group/quorum_plan.py",
        "(m.step, m.lineage) == (step, lineage)",
        "m.step == step",
        Trace("two_groups_at_an_equal_step_with_different_weights"),
    ),
    # ---- what was found later
    Mutation(
        "there is no fence after a key that is gone",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "        fenced_until = time.monotonic() + fence\n",
        "        fenced_until = 0.0 if expected is None else time.monotonic() + fence\n",
        Trace("the_deposer_releases_the_key_and_a_third_takes_it"),
    ),
    Mutation(
        "there is no fence after a takeover",
        f"{LIGHTHOUSE}/quorum/takeover.py",
        "        self._fenced_until = max(fenced_until, self._fenced_until)\n",
        "        self._fenced_until = 0.0\n",
        Trace("a_stranger_asks_the_next_leader"),
    ),
    Mutation(
        "a leader that slept past its lease answers before it steps down",
        f"{LIGHTHOUSE}/leadership/term.py",
        "        return self._until is not None and time.monotonic() >= self._until()\n",
        "        return False\n",
        Trace("a_leader_that_slept_past_its_lease_says_nothing"),
    ),
    Mutation(
        "the fence does not know of a longer lease that a leader had before",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "                fence = max(self.core.lease, _seconds(longest))\n",
        "                fence = max(self.core.lease, 0.0 * _seconds(longest))\n",
        Trace("the_next_leader_has_a_shorter_lease"),
    ),
    # ---- leadership
    Mutation(
        "a takeover does not raise the epoch",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "                epoch = parse_epoch(stored) + 1\n",
        "                epoch = max(1, parse_epoch(stored))\n",
        Trace("a_quorum_id_raised_for_a_failed_commit_outlives_the_leader"),
    ),
    Mutation(
        "a lease counts from when its renewal was answered",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "            self.core.renewed(sent)\n",
        "            self.core.renewed(time.monotonic())\n",
        Trace("a_renewal_counts_from_when_it_was_sent"),
    ),
    Mutation(
        "a lease has no margin for clocks that differ",
        f"{LIGHTHOUSE}/leadership/election.py",
        "0.9 * self.lease",
        "self.lease",
        Trace("a_slow_clock_is_within_the_margin_of_the_lease"),
    ),
    Mutation(
        "a leader goes on though the key is another's",
        f"{LIGHTHOUSE}/leadership/election.py",
        "            if self.known and self.value != self.mine:\n",
        "            if self.value == b'never':\n",
        Trace("a_deposed_leader_that_hears_of_nothing_stops_before_its_lease_ends"),
    ),
    Mutation(
        "a leader whose lease cannot be renewed does not step down",
        f"{LIGHTHOUSE}/leadership/election.py",
        "            if now >= self.until:\n",
        "            if now >= self.until + 1000:\n",
        Trace("the_store_is_away_for_longer_than_a_lease"),
    ),
    Mutation(
        "a follower takes over without ever having reached the leader",
        f"{LIGHTHOUSE}/leadership/election.py",
        "        if self._linked == leader:\n            self._linked",
        "        if True:\n            self._linked",
        Test(
            "tests/unit/lighthouse/test_election.py::"
            "test_a_leader_is_succeeded_when_an_established_link_to_it_breaks_and_not_otherwise"
        ),
    ),
    Mutation(
        "who waits for its lease to be given back spins",
        f"{LIGHTHOUSE}/leadership/campaign.py",
        "self.core.deadline() if free else None",
        "self.core.deadline()",
        Trace("a_leader_whose_lease_is_being_given_back_does_not_spin"),
    ),
    Mutation(
        "a leader that no group reaches goes on",
        f"{LIGHTHOUSE}/jobs/lighthouse_node.py",
        "        elif now - max(self._led_since, self._alone_since) > ALONE_SECONDS:\n",
        "        elif not now:\n",
        Trace("a_leader_that_no_group_reaches_gives_way"),
    ),
    Mutation(
        "the writes of a term do not compare who leads",
        f"{LIGHTHOUSE}/leadership/term.py",
        '        mine = (Compare(EPOCH_KEY, b"%d" % self.epoch), *leader)\n',
        "        mine = (*leader[:0],)\n",
        Seeds(2, 0, 500),
    ),
    Mutation(
        "what stands behind a write is said before it is written",
        f"{LIGHTHOUSE}/jobs/job.py",
        "                    await self._write(decision.record)\n",
        "                    self._loop.create_task(self._write(decision.record))\n",
        Seeds(2, 0, 50),
    ),
    Mutation(
        "an answer goes without the list to who does not know it",
        f"{LIGHTHOUSE}/jobs/job.py",
        "            if session.listed == listed and listed is not None:\n",
        "            if announce.uniform:\n",
        Seeds(2, 0, 50),
    ),
    Mutation(
        "an epoch that a group has seen is not raised above",
        f"{LIGHTHOUSE}/jobs/lighthouse_node.py",
        "        elif hello.epoch_seen < term.epoch or (",
        "        elif hello or (",
        Test(
            "tests/services/lighthouse/test_lighthouse_terms.py::test_raising_the_epoch_in_a_store_that_fails_welcomes_nobody"
        ),
    ),
    # ---- the quorum
    Mutation(
        "a quorum_id that a group has seen is not raised above",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "        if seen > state.record.quorum_id:\n",
        "        if seen < 0:\n",
        Test(
            "tests/scenarios/test_scenarios.py::"
            "test_the_lighthouse_decides_as_the_scenario_says[25_store_restored_from_a_backup]"
        ),
    ),
    Mutation(
        "there is no grace after a takeover",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "        if restarted and record.members:\n",
        "        if restarted and not record:\n",
        Trace("a_stranger_asks_the_next_leader"),
    ),
    Mutation(
        "a group that goes to another lighthouse counts as lost",
        f"{LIGHTHOUSE}/quorum/machine.py",
        'departures.part(state, group, "moved", "goes on with another lighthouse", now)',
        'departures.lose(state, group, "moved", now)',
        Test("tests/unit/quorum/test_core_sessions.py::test_moving_to_another_lighthouse_is_no_loss"),
    ),
    Mutation(
        "a cancelled request stays open",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "request.request == number:\n            self._groups.withdraw(group)\n",
        "request.request == number:\n            pass\n",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "a quorum that lost a member in between keeps its quorum_id",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "        if same and not failed and not state.round.lost and not anew",
        "        if same and not failed and not anew",
        Test(
            "tests/unit/quorum/test_core_rules.py::"
            "test_quorum_id_grows_with_another_membership_a_failed_commit_or_a_lost_member_and_else_stays"
        ),
    ),
    Mutation(
        "a quorum whose member reports a failed commit keeps its quorum_id",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "        failed = any(request.commit_failures for request in requests)\n",
        "        failed = False\n",
        Seeds(1, 0, 500),
    ),
    Mutation(
        "a quorum is confirmed although a member does not ask",
        f"{LIGHTHOUSE}/quorum/rules/quorum_rules.py",
        "groups.members_asking == quorum_size",
        "groups.members_asking >= quorum_size - 1",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "min_replicas is not kept",
        f"{LIGHTHOUSE}/quorum/rules/quorum_rules.py",
        ">= max(1, policy.min_replicas)",
        ">= 1",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "an evicted group may come back",
        f"{LIGHTHOUSE}/quorum/bans.py",
        "    if replica_id in record.evicted:\n",
        "    if not replica_id:\n",
        Trace("an_eviction_outlives_the_leader"),
    ),
    Mutation(
        "a readmission lifts the ban of a name that begins like the target",
        f"{LIGHTHOUSE}/quorum/bans.py",
        "if ban.target in (target, *incarnations)]",
        "if target in (ban.target, name_of(ban.target))]",
        Test(
            "tests/unit/mesh/test_group_names.py::test_a_ban_and_its_readmission_reach_the_group_of_that_name_and_no_other"
        ),
    ),
    Mutation(
        "members are not told that one of them is lost",
        f"{LIGHTHOUSE}/quorum/changes/departures.py",
        "    if sessions := state.member_sessions(lambda _: True):\n",
        "    if sessions := ():\n",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "members left behind by a quorum are not told",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "        if left_behind:\n",
        "        if left_behind and not state.record:\n",
        Test("tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[15_healing]"),
    ),
    Mutation(
        "an answer that was lost with its connection is not given again",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "session is not None and request.request == group.answered_request:\n",
        "session is None:\n",
        Test(
            "tests/scenarios/test_scenarios.py::"
            "test_the_lighthouse_decides_as_the_scenario_says[05_answer_lost_with_the_connection]"
        ),
    ),
    Mutation(
        "a list that is not uniform keeps its version",
        f"{LIGHTHOUSE}/quorum/announcing.py",
        "        if last is not None and last.uniform and uniform and same:\n",
        "        if last is not None and same:\n",
        Seeds(1, 0, 200),
    ),
    # ---- what all groups have in common
    Mutation(
        "groups with other settings train together",
        f"{LIGHTHOUSE}/quorum/changes/agreements.py",
        "    if job_settings.differ(one.settings, other.settings):\n        return True\n",
        "",
        Test(
            f"{SETTINGS}::test_a_group_with_other_settings_is_denied_with_the_first_difference_and_nobody_waits_for_it"
        ),
    ),
    Mutation(
        "settings are compared only where parameters differ",
        f"{LIGHTHOUSE}/quorum/changes/agreements.py",
        'if settings not in ("", state.settings) or layout',
        "if layout",
        Test(f"{SETTINGS}::test_a_setting_that_only_one_of_two_versions_knows_is_a_difference"),
    ),
    Mutation(
        "a trainer does not say its settings",
        "libs/keepstep/manager.py",
        "            settings=context.job_settings,\n        )\n",
        "        )\n",
        Test(
            "tests/services/manager/agreement/test_agreement.py::"
            "test_of_three_groups_the_one_with_another_setting_is_refused_and_the_others_go_on_equal[init_sync]"
        ),
    ),
    Mutation(
        "a round heals although a member allows none",
        f"{LIGHTHOUSE}/quorum/announcing.py",
        "allow_heal = all(request.allow_heal for",
        "allow_heal = any(request.allow_heal for",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "the answer of a round without healing does not say so",
        f"{LIGHTHOUSE}/jobs/job.py",
        "        allow_heal=announce.allow_heal,\n",
        "",
        Seeds(2, 0, 100),
    ),
    Mutation(
        "a group divides by its own policy of healing instead of the round's",
        "libs/keepstep/step/attempt.py",
        "        self.allow_heal = self.allow_heal and plan.allow_heal\n",
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
        "statistics that do not train are averaged",
        "libs/keepstep/data_parallel/synced_buffers.py",
        "if buffer.owner.training else",
        "if buffer.owner else",
        Test(f"{BUFFERS}::test_statistics_of_a_norm_that_does_not_train_stay_bit_for_bit"),
    ),
    Mutation(
        "what is done with a buffer is not compared",
        "libs/keepstep/data_parallel/synced_buffers.py",
        "{self.dtype} {self.treatment.value}",
        "{self.dtype}",
        Test(f"{BUFFERS}::test_a_group_that_treats_a_buffer_in_another_way_is_refused[averaged]"),
    ),
    # ---- whether groups are equal
    Mutation(
        "half of the roots are taken for most of them",
        f"{LIGHTHOUSE}/quorum/rules/verification.py",
        "return root if 2 * len(groups) > sum",
        "return root if 2 * len(groups) >= sum",
        Test(VERIFICATION),
    ),
    Mutation(
        "roots of different states are compared",
        f"{LIGHTHOUSE}/quorum/rules/verification.py",
        "            if _state(root) == (step, lineage):\n",
        "            if root.step <= step:\n",
        Test(VERIFICATION),
    ),
    Mutation(
        "a group that did not get the answer that it diverged counts as healthy",
        f"{LIGHTHOUSE}/quorum/groups.py",
        "        group.diverged = group.diverged and stands_still and not healed\n",
        "        group.diverged = False\n",
        Test(VERIFICATION),
    ),
    Mutation(
        "a diverged group that healed before a step heals for ever",
        f"{LIGHTHOUSE}/quorum/groups.py",
        "        group.diverged = group.diverged and stands_still and not healed\n",
        "        group.diverged = group.diverged and stands_still\n",
        Test(f"{HEAL_ROUNDS}::test_a_diverged_group_that_healed_may_ask_for_the_same_state_again"),
    ),
    Mutation(
        "a heal that failed makes a diverged group sound",
        f"{LIGHTHOUSE}/quorum/groups.py",
        "        healed = group.healing is not None and group.healing.ended and not group.healing.error\n",
        "        healed = group.healing is not None and group.healing.ended\n",
        Test(f"{HEAL_ROUNDS}::test_a_diverged_group_that_healed_may_ask_for_the_same_state_again"),
    ),
    Mutation(
        "a quorum before which groups heal counts as a step",
        f"{LIGHTHOUSE}/quorum/groups.py",
        "request.commit_failures == 0 and not (group.answer and request.step == group.answer.step)\n",
        "request.commit_failures == 0\n",
        Test(f"{HEAL_ROUNDS}::test_it_is_no_step_that_was_committed_or_failed"),
    ),
    Mutation(
        "a source that abandons a step tells its joiners nothing",
        "libs/keepstep/step/attempt.py",
        "        self.refuse_joiners(reason)\n",
        "",
        Test(f"{ABANDONED}::test_a_source_that_begins_another_step_refuses_its_joiner_at_once"),
    ),
    Mutation(
        "all joiners of a source are served at once",
        "libs/keepstep/checkpointing/direct/admission.py",
        "            if self.ahead(reader) >= self._at_once - self._working(now):\n",
        "            if self.ahead(reader) < 0:\n",
        Test("tests/unit/checkpointing/test_admission.py::test_the_next_has_a_turn_when_one_ends"),
    ),
    Mutation(
        "the furthest state is gone on from, sound or not",
        f"{MESH}/protocol/lineage.py",
        "    return soundness(state.step, lineage), came.resumed,",
        "    return came.resumed,",
        Test(VERIFICATION),
    ),
    # ---- which state a job goes on from
    Mutation(
        "the highest step is gone on from, whatever was resumed since",
        f"{MESH}/protocol/lineage.py",
        "soundness(state.step, lineage), came.resumed,",
        "soundness(state.step, lineage),",
        Test(HISTORIES),
    ),
    Mutation(
        "the highest quorum_id is gone on from, however little was trained",
        f"{MESH}/protocol/lineage.py",
        "came.resumed, state.step, came.quorum_id, live",
        "came.resumed, came.quorum_id, state.step, live",
        Test(HISTORIES),
    ),
    Mutation(
        "a loaded checkpoint counts as the live state that it was saved from",
        f"{MESH}/protocol/lineage.py",
        'else f"{LOADED}{lineage}"',
        "else lineage",
        Test(HISTORIES),
    ),
    Mutation(
        "a group that takes part behind keeps its lineage",
        "libs/keepstep/step/progress.py",
        "        elif not self._keeps_apart():\n",
        "        elif self.step < 0:\n",
        Test(HISTORIES),
    ),
    Mutation(
        "a group that takes part behind gets the lineage of the others",
        "libs/keepstep/step/attempt.py",
        "progress.commit(plan.quorum_id, participants, behind=behind)",
        "progress.commit(plan.quorum_id, participants, behind=False)",
        Test(f"{SYNCHRONIZED}::test_groups_that_do_not_say_so_are_not_equal_and_heal_next_time"),
    ),
    Mutation(
        "a group that says that all are equal has the lineage of one that does not",
        f"{MESH}/protocol/lineage.py",
        "{'synchronized:' if synchronized else ''}",
        "",
        Test(f"{SYNCHRONIZED}::test_a_group_that_says_so_is_not_equal_to_one_that_does_not"),
    ),
    Mutation(
        "a group that was made equal keeps its count of batches",
        "libs/keepstep/step/attempt.py",
        "batches = (plan.reference_batches if behind else 0) or progress",
        "batches = progress",
        Test(f"{SYNCHRONIZED}::test_groups_that_say_that_they_are_equal_are_and_nobody_heals"),
    ),
    Mutation(
        "a job that goes on from a checkpoint keeps its quorum_id",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "        anew = any(",
        "        anew = False and any(",
        Test(
            "tests/unit/quorum/test_core_lineages.py::"
            "test_a_quorum_that_goes_on_from_a_state_that_begins_anew_gets_another_quorum_id"
        ),
    ),
    Mutation(
        "whether a member had its answer is told by its step alone",
        f"{LIGHTHOUSE}/quorum/machine.py",
        "where_it_was == (group.step, group.lineage) and session",
        "request.step <= answer.step and session",
        Test(
            "tests/unit/quorum/test_core_lineages.py::"
            "test_a_member_above_the_step_of_an_answer_that_it_never_had_leaves_nobody_waiting"
        ),
    ),
    Mutation(
        "beside a group that cannot heal before the forward pass others count all groups",
        "libs/keepstep/step/attempt.py",
        "(self._first_step and plan.first_step)\n",
        "(self._first_step and plan.max_step == 0)\n",
        Test(f"{SYNCHRONIZED}::test_beside_groups_that_begin_a_diverged_one_counts_in_no_average"),
    ),
    Mutation(
        "a group whose heal failed forgets that it diverged",
        "libs/keepstep/step/attempt.py",
        "                context.diverge()\n",
        "                pass\n",
        Test(f"{GROUPS}::test_a_heal_that_fails_leaves_a_group_that_nobody_takes_for_healthy"),
    ),
    Mutation(
        "what a failed step left behind is compared",
        "libs/keepstep/step/attempt.py",
        "        if self.error is None:  # else BatchNorm's",
        "        if True:  # else BatchNorm's",
        Test(f"{GROUPS}::test_what_a_failed_step_left_behind_is_not_compared"),
    ),
    # ---- the groups
    Mutation(
        "rank 0 leaves out a member list that has changed",
        "libs/keepstep/group/rank_lists.py",
        "        if known == self._number:\n",
        "        if known:\n",
        Test("tests/unit/group/test_rank_lists.py::test_a_changed_list_is_sent_once_on_every_connection"),
    ),
    Mutation(
        "a member stores a short address though not all members can read it",
        "libs/keepstep/step/reconfigurer.py",
        "        version = min(member.info.rendezvous for member in plan.members)\n",
        "        version = max(member.info.rendezvous for member in plan.members)\n",
        Test("tests/unit/group/test_rendezvous_size.py::test_addresses_are_short_when_every_member_can_read_them"),
    ),
    Mutation(
        "a group takes a lower epoch than it has seen",
        f"{MESH}/session/session_machine.py",
        "        if epoch < self.epoch:\n",
        "        if epoch < 0:\n",
        Trace("a_group_that_met_the_next_leader_comes_back_to_the_one_before"),
    ),
    Mutation(
        "a group that comes back does not say which answer it holds",
        f"{MESH}/session/session_machine.py",
        "            held=self.held,\n",
        "            held=None,\n",
        Trace("a_round_that_only_some_members_heard_of"),
    ),
    Mutation(
        "who slept takes the other end for silent",
        f"{MESH}/session/liveness.py",
        "        if self._asked is None or stalled:\n",
        "        if self._asked is None:\n",
        Test("tests/unit/mesh/test_liveness.py::test_who_slept_asks_again_instead"),
    ),
    Mutation(
        "a request is not sent again on a new connection",
        f"{MESH}/session/session_machine.py",
        "        request = self.open\n        if request is None:\n            return None\n        known",
        "        request = self.open\n        if request is None or self._known_info is None and request.request > 9:\n"
        "            return None\n        known",
        Seeds(1, 0, 200),
    ),
    # ---- the end of jobs
    Mutation(
        "a job that has sessions expires",
        f"{LIGHTHOUSE}/jobs/expiry.py",
        "    return NEVER if use.sessions or not use.ttl else use.used_at + use.ttl\n",
        "    return NEVER if not use.ttl else use.used_at + use.ttl\n",
        Test("tests/unit/lighthouse/test_expiry.py::test_a_job_with_sessions_never_expires"),
    ),
    Mutation(
        "a job expires while its groups may come back",
        f"{LIGHTHOUSE}/jobs/expiry.py",
        "    found = [use for use in uses if due_at(use) <= now and not use.awaited]\n",
        "    found = [use for use in uses if due_at(use) <= now]\n",
        Test("tests/unit/lighthouse/test_expiry.py::test_a_job_to_which_groups_may_come_back_does_not_expire"),
    ),
    Mutation(
        "the quorum_id of a deleted job is given again",
        f"{LIGHTHOUSE}/jobs/job_endings.py",
        "            floor = max(self.floor, quorum_id + 1)\n",
        "            floor = self.floor\n",
        Test("tests/services/lighthouse/test_job_deletion.py::test_a_zombie_of_a_deleted_job_never_counts_as_equal"),
    ),
)
