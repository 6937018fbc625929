"""Bugs in how groups finish together: ``keepstep_lighthouse.quorum.finishing.finishing`` and what it relies on."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test

LIGHTHOUSE = "services/keepstep_lighthouse"
SETTINGS = "tests/unit/keepstep_lighthouse/quorum/agreement/test_common_settings.py"
SCENARIO = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says"
FINISHING = f"{SCENARIO}[35_finishing_together]"
OTHER_ENDS = f"{SCENARIO}[36_other_last_steps]"
WAITED_FOR = f"{SCENARIO}[37_who_is_waited_for_at_the_end]"
ENDS_TOGETHER = "tests/simulation/test_simulation.py::test_groups_finish_together_or_learn_that_the_others_did[1]"

MUTATIONS = (
    Mutation(
        "the last step of the job is that of a group with weights which the job has left",
        "services/keepstep_lighthouse/quorum/finishing/finishing.py",
        "    sound = [group for group in sound if origin(group.lineage).resumed == resumed]",
        "    sound = [group for group in sound if resumed >= 0]",
        Test(
            "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says[36_other_last_steps]"
        ),
    ),
    Mutation(
        "a job is closed while its groups have different states of the last step",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "_is_final(group) and (group.step, group.lineage) == (step, lineage) and",
        "_is_final(group) and group.step == step and",
        Test(WAITED_FOR),
    ),
    Mutation(
        "a group that asks for rounds without healing keeps the others from healing at the end",
        f"{LIGHTHOUSE}/quorum/forming/announcing.py",
        "            allow_heal=allow_heal or finishing,\n",
        "            allow_heal=allow_heal,\n",
        Test(f"{SETTINGS}::test_groups_heal_where_groups_finish_even_if_one_asked_for_a_round_without_healing"),
    ),
    Mutation(
        "a job is closed before its groups have published the final state",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "    if not at_end or any(_publish(group) == TO_PUBLISH for group in chosen):\n",
        "    if not at_end:\n",
        Test(OTHER_ENDS),
    ),
    Mutation(
        "the final state of a job is not written",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "        if step:\n            self._job.persist(",
        "        if step < 0:\n            self._job.persist(",
        Test(ENDS_TOGETHER),
    ),
    Mutation(
        "groups that finish leave one behind that was killed in its heals",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "        if self._probation.let_in_at_end():\n",
        "        if not self._job.groups:\n",
        Test(WAITED_FOR),
    ),
    Mutation(
        "groups that finish do not wait for a group that was lost lately",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "    if now < until:\n",
        "    if now < until and step < 0:\n",
        Test(WAITED_FOR),
    ),
    Mutation(
        "groups that finish do not wait for a group that is connected and has not asked",
        f"{LIGHTHOUSE}/quorum/forming/quorum_rules.py",
        " and groups.members_asking == quorum_size and not groups.final:\n",
        " and groups.members_asking == quorum_size:\n",
        Test(FINISHING),
    ),
    Mutation(
        "a group trains on although the job is closed",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "        if final is None:\n            return False\n",
        "        if final is None or not request.final:\n            return False\n",
        Test(f"{SCENARIO}[35_finishing_together]"),
    ),
)
