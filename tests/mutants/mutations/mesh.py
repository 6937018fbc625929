"""Bugs in the code that all packages share, ``keepstep_mesh``, and in sessions."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Seeds, Test, Trace

MESH = "libs/keepstep_mesh"
OPEN_REQUESTS = "tests/unit/keepstep/session/test_open_requests.py"
SYNCHRONIZED = "tests/services/manager/agreement/test_synchronized.py"
HISTORIES = "tests/unit/keepstep_mesh/protocol/test_lineage_model.py::test_no_short_history_breaks_a_rule"
VERIFICATION = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[30_verify_replicas]"

MUTATIONS = (
    Mutation(
        "the reference state is the furthest, sound or not",
        f"{MESH}/protocol/lineage.py",
        "    return soundness(state.step, lineage), came.resumed,",
        "    return came.resumed,",
        Test(VERIFICATION),
    ),
    Mutation(
        "the reference state is the highest step, whatever was resumed since",
        f"{MESH}/protocol/lineage.py",
        "soundness(state.step, lineage), came.resumed,",
        "soundness(state.step, lineage),",
        Test(HISTORIES),
    ),
    Mutation(
        "the reference state is the highest quorum_id, at any step",
        f"{MESH}/protocol/lineage.py",
        "came.resumed, state.step, came.quorum_id, not",
        "came.resumed, came.quorum_id, state.step, not",
        Test(HISTORIES),
    ),
    Mutation(
        "a loaded checkpoint has the lineage of the live state",
        f"{MESH}/protocol/lineage.py",
        'else f"{LOADED}{lineage}"',
        "else lineage",
        Test(HISTORIES),
    ),
    Mutation(
        "a synchronized commit has the lineage of a usual one",
        f"{MESH}/protocol/lineage.py",
        "{'synchronized:' if synchronized else ''}",
        "",
        Test(f"{SYNCHRONIZED}::test_a_group_that_says_so_is_not_equal_to_one_that_does_not"),
    ),
    Mutation(
        "a group accepts a lower epoch than it has seen",
        "libs/keepstep/session/session_machine.py",
        "        if epoch < self.epoch:\n",
        "        if epoch < 0:\n",
        Trace("a_group_that_met_the_next_leader_comes_back_to_the_one_before"),
    ),
    Mutation(
        "a group that reconnects does not report the answer it holds",
        "libs/keepstep/session/session_machine.py",
        "            held=self.held,\n",
        "            held=None,\n",
        Trace("a_round_that_only_some_members_heard_of"),
    ),
    Mutation(
        "a process that was paused takes its peer for silent",
        "libs/keepstep/session/liveness.py",
        "        if self._asked is None or stalled:\n",
        "        if self._asked is None:\n",
        Test("tests/unit/keepstep/session/test_liveness.py::test_a_worker_that_slept_asks_again_instead"),
    ),
    Mutation(
        "a request is not sent again on a new connection",
        "libs/keepstep/session/session_machine.py",
        "        request = self.open\n        if request is None:\n            return None\n        known",
        "        request = self.open\n        if request is None or self._known_info is None and self.number > 9:\n"
        "            return None\n        known",
        Seeds(1, 0, 200),
    ),
    Mutation(
        "a request that is late is not withdrawn from the server",
        "libs/keepstep/session/open_requests.py",
        "        one = self._open.pop(key)\n        self._give_up(key, one)\n",
        "        one = self._open.pop(key)\n",
        Test(f"{OPEN_REQUESTS}::test_a_request_ends_at_its_deadline_and_the_others_do_not"),
    ),
    Mutation(
        "the end of a session leaves its requests open",
        "libs/keepstep/session/open_requests.py",
        "        for key in tuple(self._open):\n",
        "        for key in ():\n",
        Test(f"{OPEN_REQUESTS}::test_the_end_of_the_session_ends_all_requests"),
    ),
    Mutation(
        "the silence of a peer has no consequence",
        "libs/keepstep/session/message_channel.py",
        "                self._on_silent(now - self.link.last_received)\n",
        "                pass\n",
        Test("tests/services/group/test_rank_silence.py::test_a_frozen_rank_is_noticed_after_the_heartbeat_timeout[0]"),
    ),
)
