"""Bugs in the probation of groups that keep others from committing: in its evidence, and in the rules."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test

PROBATION = "services/keepstep_lighthouse/quorum/probation"
EVIDENCE = "tests/unit/keepstep/step/test_failure_evidence.py"
OTHERS_GO_ON = "tests/simulation/test_simulation.py::test_the_others_go_on_without_an_operator_and_keep_their_pace"
SCENARIOS = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says"

MUTATIONS = (
    Mutation(
        "the evidence about a failed step is not sent",
        "libs/keepstep/session/session_machine.py",
        "        request = self.open\n        if request is None:\n",
        "        request = self.open and copier(QuorumRequest, QuorumRequest, 'failure')(self.open, None)\n"
        "        if request is None:\n",
        Test(f"{OTHERS_GO_ON}[fails]"),
    ),
    Mutation(
        "two groups that cannot reach each other both stay",
        f"{PROBATION}/evidence.py",
        "        found |= pairs\n",
        "",
        Test(f"{OTHERS_GO_ON}[cut off]"),
    ),
    Mutation(
        "heals that fail again and again have no consequence",
        f"{PROBATION}/probation.py",
        "            if self.partings.heal_failed(name) or name in self.partings.groups:\n",
        "            if name in self.partings.groups:\n",
        Test(f"{SCENARIOS}[41_heals_that_always_fail]"),
    ),
    Mutation(
        "a group that is killed after it has healed counts as one whose heal failed",
        f"{PROBATION}/probation.py",
        "        if (told.error or not told.ended) and self.partings.heal_failed(group.name):\n",
        "        if self.partings.heal_failed(group.name):\n",
        Test(f"{SCENARIOS}[41_heals_that_always_fail]"),
    ),
    Mutation(
        "all groups that a liar names are accused",
        f"{PROBATION}/evidence.py",
        "            pairs &= both\n",
        "            pass\n",
        Test(
            "tests/unit/keepstep_lighthouse/quorum/probation/test_evidence.py::test_what_the_failures_of_a_round_accuse"
        ),
    ),
    Mutation(
        "a first failure parts a group",
        f"{PROBATION}/evidence.py",
        "            strike.confirmed = strike.confirmed or strike.round < number or one in believed\n",
        "            strike.confirmed = True\n",
        Test(f"{SCENARIOS}[38_group_that_fails_by_itself]"),
    ),
    Mutation(
        "groups are parted although a quorum needs them",
        f"{PROBATION}/probation.py",
        '        short = f"{left} would be left and a quorum needs {least} groups" if left < least else ""\n',
        '        short = ""\n',
        Test(f"{SCENARIOS}[42_liars_and_limits_of_probation]"),
    ),
    Mutation(
        "a round that lost a member is judged",
        f"{PROBATION}/probation.py",
        "    if round_.lost or any(group.member for group in groups.suspects.values()):\n",
        "    if any(group.member for group in groups.suspects.values()):\n",
        Test(f"{SCENARIOS}[42_liars_and_limits_of_probation]"),
    ),
    Mutation(
        "a group that fails again and again is tried as often",
        f"{PROBATION}/partings.py",
        "PARTED_ROUNDS * duration) * 2.0 ** min(times - 1, 20)\n",
        "PARTED_ROUNDS * duration)\n",
        Test(f"{SCENARIOS}[38_group_that_fails_by_itself]"),
    ),
    Mutation(
        "the retry of a parted group stays open",
        f"{PROBATION}/probation.py",
        "            retries.deny_parted(self._job, group)\n",
        "",
        Test(f"{SCENARIOS}[48_retried_steps]"),
    ),
    Mutation(
        "groups that answer a probe are named",
        "libs/keepstep/step/evidence/failure_evidence.py",
        'if probe.result() == "silent"} | again\n',
        'if probe.result() == "answers"} | again\n',
        Test(f"{EVIDENCE}::test_a_failed_step_names_the_groups_that_give_no_answer"),
    ),
    Mutation(
        "the loss of a group does not explain a failed step",
        "libs/keepstep/step/evidence/failure_evidence.py",
        "        self._lost_of = quorum_id\n",
        "        pass\n",
        Test(f"{EVIDENCE}::test_a_lost_group_explains_the_failure_and_ends_the_probe"),
    ),
    Mutation(
        "an error of one rank is lost among those of the others",
        "libs/keepstep/group/ranks/merging.py",
        "    if own := [one for one in known if one.cause == OWN]:\n",
        "    if own := [one for one in known[:1] if one.cause == OWN]:\n",
        Test(f"{EVIDENCE}::test_the_failures_of_the_ranks_become_that_of_the_group"),
    ),
)
