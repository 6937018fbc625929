"""Bugs in the comparisons of weights, and in what follows for groups that differ."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test, Trace

LIGHTHOUSE = "services/keepstep_lighthouse"
STEPS = "tests/unit/keepstep_lighthouse/quorum/verification/test_steps_of_comparisons.py"
SCENARIO = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says"
AFTER_CHANGES = f"{SCENARIO}[49_compared_after_changes]"
AT_THE_END = f"{SCENARIO}[50_different_at_the_end]"

MUTATIONS = (
    Mutation(
        "weights are compared while a member is behind",
        f"{LIGHTHOUSE}/quorum/verification/comparisons.py",
        "        if all_equal and self._due is not None and step >= self._due:\n",
        "        if self._due is not None and step >= self._due:\n",
        Test(f"{STEPS}::test_weights_are_compared_when_no_member_is_behind_any_more"),
    ),
    Mutation(
        "a job whose members change all the time compares all the time",
        f"{LIGHTHOUSE}/quorum/verification/comparisons.py",
        "max(step + STEPS_AFTER_CHANGE, self._earliest)",
        "step + STEPS_AFTER_CHANGE",
        Test(f"{STEPS}::test_members_that_change_in_each_step_are_compared_every_few_steps"),
    ),
    Mutation(
        "after the job went back, no change leads to a comparison for a long time",
        f"{LIGHTHOUSE}/quorum/verification/comparisons.py",
        "self._due > step + STEPS_BETWEEN",
        "self._due < 0",
        Test(f"{STEPS}::test_the_next_change_counts_again_after_the_job_went_back"),
    ),
    Mutation(
        "a group whose script differs heals for ever",
        f"{LIGHTHOUSE}/quorum/settling.py",
        "        if self._is_due and groups.roots > 1 and features.verification.refuse_diverged():\n",
        "        if groups.roots < 0 and features.verification.refuse_diverged():\n",
        Test(AFTER_CHANGES),
    ),
    Mutation(
        "a group is refused the first time that it differs",
        f"{LIGHTHOUSE}/quorum/verification/divergence.py",
        "        if first is None or same or group.diverged:\n            continue\n",
        "        if group.diverged:\n            continue\n        first = first or Divergence('', '', 0, 0)\n",
        Test(AFTER_CHANGES),
    ),
    Mutation(
        "a lighthouse that takes over does not know which groups had to heal",
        f"{LIGHTHOUSE}/quorum/verification/divergence.py",
        "        job.persist(replace(job.record, diverged=diverged))\n",
        "        job.record = replace(job.record, diverged=diverged)\n",
        Test(AFTER_CHANGES),
    ),
    Mutation(
        "a group is refused for the difference that it could not heal before the lighthouse changed",
        f"{LIGHTHOUSE}/quorum/verification/divergence.py",
        "if first is None or same or group.diverged:\n",
        "if first is None or group.diverged:\n",
        Test(f"{SCENARIO}[53_differences_over_lighthouses]"),
    ),
    Mutation(
        "a lighthouse that takes over does not know whose optimizers stepped with other values",
        f"{LIGHTHOUSE}/quorum/agreement/step_reports.py",
        "                divergence.note(self._job, group, VALUES, *key)\n",
        "                divergence.first_difference(self._job, group, VALUES)\n",
        Test(f"{SCENARIO}[53_differences_over_lighthouses]"),
    ),
    Mutation(
        "a job is closed with different weights",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "        at_end = at_end and (comparison is None or not comparison.diverged)\n",
        "",
        Trace("a_bit_flips_after_the_last_step"),
    ),
    Mutation(
        "two groups finish with different weights",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "    if comparison is not None and divergence.refuse_at_end(",
        "    if comparison is not None and comparison.diverged and divergence.refuse_at_end(",
        Test(AT_THE_END),
    ),
    Mutation(
        "a group that comes to a closed job with other weights finishes",
        f"{LIGHTHOUSE}/quorum/finishing/finishing.py",
        "    if request.final and holds and not _has_other_root(request, final):\n",
        "    if request.final and holds:\n",
        Test(AT_THE_END),
    ),
)
