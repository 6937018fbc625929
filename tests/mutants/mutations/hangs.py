"""Bugs in the verdict on groups that hang: who is ended, and after which time."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test

HANGS = "services/keepstep_lighthouse/quorum/hangs/hangs.py"
VERDICT = "services/keepstep_lighthouse/quorum/hangs/verdict.py"
UNIT = "tests/unit/keepstep_lighthouse/quorum/hangs/test_hangs.py"
SCENARIOS = "tests/scenarios/test_scenarios.py::test_the_lighthouse_decides_as_the_scenario_says"

MUTATIONS = (
    Mutation(
        "a stage of a pipeline is compared with another stage, which reduces more",
        VERDICT,
        "one.found.rank if several else None for",
        "None for",
        Test(
            "tests/unit/keepstep_lighthouse/quorum/hangs/test_verdict.py"
            "::test_stages_of_a_pipeline_that_reduce_fewer_units_are_not_behind"
        ),
    ),
    Mutation(
        "a group is ended although all groups stand in one line",
        VERDICT,
        "    if len(lines) == 1:\n",
        "    if len(lines) == 1 and len(groups) > 2:\n",
        Test(f"{SCENARIOS}[55_hangs]"),
    ),
    Mutation(
        "a group that works in a declared section counts as one that hangs",
        VERDICT,
        "            return self.found.section_ms > self.found.section_limit_ms\n",
        "            return self.seconds >= limit\n",
        Test(f"{SCENARIOS}[55_hangs]"),
    ),
    Mutation(
        "a group whose stack changes counts as one that hangs",
        VERDICT,
        "(1.0 if stands else MOVING_FACTOR)\n",
        "1.0\n",
        Test(f"{SCENARIOS}[55_hangs]"),
    ),
    Mutation(
        "a group that has never asked is not looked at",
        HANGS,
        "        return turn, now if heal is not None or group.working_since is None else group.working_since\n",
        "        return turn, NEVER if group.working_since is None else group.working_since\n",
        Test(f"{SCENARIOS}[58_hangs_before_the_first_step]"),
    ),
    Mutation(
        "a group that starts has no limit of its own",
        VERDICT,
        "        own = not self.learned or self.found.waits in OWN_LIMIT\n",
        "        own = self.found.waits in OWN_LIMIT\n",
        Test(f"{SCENARIOS}[58_hangs_before_the_first_step]"),
    ),
    Mutation(
        "the groups in a collective that another one left out count as those that hang",
        VERDICT,
        "if acting else _behind(here)\n",
        "if acting else _behind(here) or tuple(here)\n",
        Test(f"{SCENARIOS}[59_left_out_collective]"),
    ),
    Mutation(
        "a collective that a group left out is not named",
        VERDICT,
        "        return Verdict(left_alone=tuple(one for one in standings if one.found.in_flight))\n",
        "        return Verdict()\n",
        Test(f"{SCENARIOS}[59_left_out_collective]"),
    ),
    Mutation(
        "three equal stacks are enough",
        VERDICT,
        "NEEDED_ANSWERS = 4\n",
        "NEEDED_ANSWERS = 3\n",
        Test(f"{SCENARIOS}[60_slow_step_in_one_function]"),
    ),
    Mutation(
        "equal stacks of one moment are enough",
        VERDICT,
        "NEEDED_SPREAD = 3 / 8\n",
        "NEEDED_SPREAD = 0.0\n",
        Test(f"{SCENARIOS}[60_slow_step_in_one_function]"),
    ),
    Mutation(
        "work that the stack does not show counts as a hang",
        HANGS,
        "found.section, found.work\n",
        "found.section\n",
        Test(f"{SCENARIOS}[60_slow_step_in_one_function]"),
    ),
    Mutation(
        "a group that heals in the step of the others counts as behind",
        VERDICT,
        "lambda one: one.found.collectives)",
        "lambda one: 10 * one.found.step + one.found.collectives)",
        Test(f"{SCENARIOS}[59_left_out_collective]"),
    ),
    Mutation(
        "collectives within one group are compared with those within others",
        VERDICT,
        "        ranks = [one for one in standings if one.replica_id == replica_id]",
        "        ranks = list(standings)",
        Test(f"{SCENARIOS}[59_left_out_collective]"),
    ),
    Mutation(
        "a group that has not asked hides one that hangs in a step",
        VERDICT,
        "        here = [one for one in standings if one.round == round_]\n",
        "        here, round_ = list(standings), (0, 0)\n",
        Test(f"{SCENARIOS}[58_hangs_before_the_first_step]"),
    ),
    Mutation(
        "a group is ended that alone has the state of the job",
        HANGS,
        " if max(held, default=(0, 0)) < least else",
        " if max(held, default=(0, 0)) < least < (0, 0) else",
        Test(f"{SCENARIOS}[55_hangs]"),
    ),
    Mutation(
        "a group that hangs is spared for steps that the job has left behind",
        HANGS,
        "    return (origin(group.lineage).resumed, group.live_step) if group.live_step else (0, 0)\n",
        "    return (0, group.live_step) if group.live_step else (0, 0)\n",
        Test(f"{UNIT}::test_a_group_that_missed_a_resume_and_hangs_is_ended_though_it_took_more_steps"),
    ),
    Mutation(
        "after a takeover, a group is in its first steps again",
        HANGS,
        "found.commits if known else 0",
        "0",
        Test(f"{SCENARIOS}[61_hangs_after_a_takeover]"),
    ),
    Mutation(
        "a lighthouse that does not know the usual step takes the least limit",
        HANGS,
        "found.commits if known else 0",
        "found.commits",
        Test(f"{SCENARIOS}[61_hangs_after_a_takeover]"),
    ),
    Mutation(
        "the next lighthouse does not learn the longest step",
        HANGS,
        "            self._job.persist(replace(record, longest_step=longest))\n",
        "            longest = 0.0\n",
        Test(f"{SCENARIOS}[61_hangs_after_a_takeover]"),
    ),
    Mutation(
        "a rank has used up its limit while it waited for others",
        VERDICT,
        "and self.acted >= self.limit(limit)",
        "and self.seconds >= self.limit(limit)",
        Test(
            "tests/unit/keepstep_lighthouse/quorum/hangs/test_hangs.py"
            "::test_time_in_which_a_rank_waited_for_others_is_not_its_own"
        ),
    ),
    Mutation(
        "the time of a step counts from a decision whose answer the store holds back",
        "services/keepstep_lighthouse/quorum/machine.py",
        "                group.working_since = now\n",
        "                group.working_since += 0\n",
        Test(
            "tests/unit/keepstep_lighthouse/quorum/hangs/test_hangs.py"
            "::test_time_in_which_the_store_holds_back_an_answer_is_not_that_of_the_groups"
        ),
    ),
)
