"""Mistakes in what all packages share: ``keepstep_mesh``."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Seeds, Test, Trace

MESH = "libs/keepstep_mesh"
SYNCHRONIZED = "tests/services/manager/agreement/test_synchronized.py"
HISTORIES = "tests/unit/lighthouse/test_lineage_model.py::test_no_short_history_breaks_a_rule"
VERIFICATION = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[30_verify_replicas]"

MUTATIONS = (
    Mutation(
        "the furthest state is gone on from, sound or not",
        f"{MESH}/protocol/lineage.py",
        "    return soundness(state.step, lineage), came.resumed,",
        "    return came.resumed,",
        Test(VERIFICATION),
    ),
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
        "a group that says that all are equal has the lineage of one that does not",
        f"{MESH}/protocol/lineage.py",
        "{'synchronized:' if synchronized else ''}",
        "",
        Test(f"{SYNCHRONIZED}::test_a_group_that_says_so_is_not_equal_to_one_that_does_not"),
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
        Test("tests/unit/mesh/session/test_liveness.py::test_who_slept_asks_again_instead"),
    ),
    Mutation(
        "a request is not sent again on a new connection",
        f"{MESH}/session/session_machine.py",
        "        request = self.open\n        if request is None:\n            return None\n        known",
        "        request = self.open\n        if request is None or self._known_info is None and request.request > 9:\n"
        "            return None\n        known",
        Seeds(1, 0, 200),
    ),
)
