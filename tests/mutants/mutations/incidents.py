"""Bugs in the verdict on the end of a group, and in the facts about it."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Test

INCIDENTS = "services/keepstep_lighthouse/incidents"
UNIT = "tests/unit/keepstep_lighthouse/incidents"
VERDICTS = f"{UNIT}/test_judgement.py::test_the_verdict_and_its_evidence"

MUTATIONS = (
    Mutation(
        "any failure in a cgroup with kills of the kernel counts as out of memory",
        f"{INCIDENTS}/judgement.py",
        "    if not killed:\n",
        "    if not report.oom_kills:\n",
        Test(f"{VERDICTS}[an exception while another process of the cgroup was killed]"),
    ),
    Mutation(
        "each XID error blames the machine",
        f"{INCIDENTS}/judgement.py",
        "if one.isdecimal() and int(one) in BAD_XIDS]",
        "if one.isdecimal()]",
        Test(f"{VERDICTS}[an XID of the script]"),
    ),
    Mutation(
        "crashes of all machines blame each of them",
        f"{INCIDENTS}/judgement.py",
        " and not around.crashes_elsewhere:",
        ":",
        Test(f"{VERDICTS}[crashes on several machines]"),
    ),
    Mutation(
        "a machine is blamed for one process that is stopped",
        f"{INCIDENTS}/judgement.py",
        "    if around.host_lives:\n",
        "    if around.came_back:\n",
        Test(f"{VERDICTS}[silence of one process of a machine]"),
    ),
    Mutation(
        "Ctrl-C is an incident",
        f"{INCIDENTS}/judgement.py",
        "    return stopped or report.code in",
        "    return report.code in",
        Test(f"{UNIT}/test_judgement.py::test_an_end_that_was_ordered_is_no_incident"),
    ),
    Mutation(
        "a report is not joined to the loss that it explains",
        f"{INCIDENTS}/joined_ends.py",
        "        if known is not None:\n            return self._decide(replace(known, report=report))\n",
        "",
        Test(f"{UNIT}/test_joined_ends.py::test_a_report_that_the_network_delayed_replaces_the_incident"),
    ),
    Mutation(
        "a second refusal of a group replaces the first",
        f"{INCIDENTS}/joined_ends.py",
        "if end is not None and end.report is None), None)",
        "if end is not None), None)",
        Test(f"{UNIT}/test_joined_ends.py::test_a_group_that_never_connected_is_decided_at_once_and_each_time"),
    ),
    Mutation(
        "faults of the script count against the machine",
        f"{INCIDENTS}/listing.py",
        "AGAINST = (",
        "AGAINST = (Verdict.SCRIPT.value, ",
        Test(f"{UNIT}/test_listing.py::test_machines_that_fail_repeatedly_are_ranked_by_what_counts_against_them"),
    ),
    Mutation(
        "a rank that ended because of another one is named as the cause",
        "libs/keepstep_cli/running/ends/last_lines.py",
        "    consequences = (0, EXIT_GROUP_FAILED, TERMINATED)\n",
        "    consequences = (0,)\n",
        Test(
            "tests/unit/keepstep_cli/running/ends/test_last_lines.py::test_the_rank_that_ended_by_itself_is_the_cause"
        ),
    ),
    Mutation(
        "a secret in the output of a rank is sent",
        "libs/keepstep_cli/running/ends/last_lines.py",
        "        text = _SECRET.sub(",
        "        _SECRET.sub(",
        Test("tests/unit/keepstep_cli/running/ends/test_last_lines.py::test_what_looks_like_a_secret_is_hidden"),
    ),
)
