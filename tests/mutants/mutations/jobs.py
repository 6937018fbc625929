"""Bugs in jobs, their sessions, and their end: ``keepstep_lighthouse.jobs``."""

from __future__ import annotations

from tests.mutants.mutation import Mutation, Seeds, Test, Trace

LIGHTHOUSE = "services/keepstep_lighthouse"
PORTS = "tests/services/lighthouse/sessions/test_closed_ports.py"

MUTATIONS = (
    Mutation(
        "a partitioned leader keeps its sessions",
        f"{LIGHTHOUSE}/jobs/lighthouse_node.py",
        "            session.end(reason, websocket.CLOSE_GOING_AWAY)\n",
        "            pass\n",
        Trace("a_leader_that_is_cut_off_closes_its_sessions"),
    ),
    Mutation(
        "a leader that no group reaches keeps its lease",
        f"{LIGHTHOUSE}/jobs/lighthouse_node.py",
        "        elif now - max(self._led_since, self._alone_since) > ALONE_SECONDS:\n",
        "        elif not now:\n",
        Trace("a_leader_that_no_group_reaches_gives_way"),
    ),
    Mutation(
        "decisions behind a write are sent before the write succeeds",
        f"{LIGHTHOUSE}/jobs/job.py",
        "                    await self._write(decision.record)\n",
        "                    self._loop.create_task(self._write(decision.record))\n",
        Seeds(2, 0, 50),
    ),
    Mutation(
        "an answer omits a member list that the group does not have",
        f"{LIGHTHOUSE}/jobs/job.py",
        "            if session.listed == listed and listed is not None:\n",
        "            if announce.uniform:\n",
        Seeds(2, 0, 50),
    ),
    Mutation(
        "a lighthouse does not raise its epoch above the one that a group has seen",
        f"{LIGHTHOUSE}/jobs/lighthouse_node.py",
        "        elif hello.epoch_seen < term.epoch or (",
        "        elif hello or (",
        Test(
            "tests/services/lighthouse/store/test_lighthouse_terms.py::test_raising_the_epoch_in_a_store_that_fails_welcomes_nobody"
        ),
    ),
    Mutation(
        "the answer of a round without healing allows healing",
        f"{LIGHTHOUSE}/quorum/forming/announcing.py",
        "            allow_heal=allow_heal or finishing,\n",
        "",
        Seeds(2, 0, 100),
    ),
    Mutation(
        "another process at the port of a group counts as the group",
        f"{LIGHTHOUSE}/jobs/port_probes.py",
        ' and said.get("replica_id") == replica_id',
        "",
        Test(f"{PORTS}::test_only_the_incarnation_itself_counts_as_an_answer"),
    ),
    Mutation(
        "an unreachable port counts as closed",
        f"{LIGHTHOUSE}/jobs/port_probes.py",
        "    except ConnectionRefusedError:\n",
        "    except OSError:\n",
        Test(f"{PORTS}::test_a_port_that_resets_or_is_unreachable_does_not_refuse"),
    ),
    Mutation(
        "a port is probed once",
        f"{LIGHTHOUSE}/jobs/port_probes.py",
        "PROBE_PAUSES = (0.0, 0.005, 0.015, 0.03, 0.05)\n",
        "PROBE_PAUSES = (0.0,)\n",
        Test(f"{PORTS}::test_a_probe_goes_on_until_the_port_of_a_dying_process_is_closed"),
    ),
    Mutation(
        "a job with sessions expires",
        f"{LIGHTHOUSE}/jobs/expiry.py",
        "    return NEVER if use.sessions or not use.ttl else use.used_at + use.ttl\n",
        "    return NEVER if not use.ttl else use.used_at + use.ttl\n",
        Test("tests/unit/keepstep_lighthouse/jobs/test_expiry.py::test_a_job_with_sessions_never_expires"),
    ),
    Mutation(
        "a job expires within the reconnect grace of its groups",
        f"{LIGHTHOUSE}/jobs/expiry.py",
        "    found = [use for use in uses if due_at(use) <= now and not use.awaited]\n",
        "    found = [use for use in uses if due_at(use) <= now]\n",
        Test(
            "tests/unit/keepstep_lighthouse/jobs/test_expiry.py::test_a_job_to_which_groups_may_come_back_does_not_expire"
        ),
    ),
    Mutation(
        "the quorum_id of a deleted job is reused",
        f"{LIGHTHOUSE}/jobs/job_endings.py",
        "            floor = max(self.floor, quorum_id + 1)\n",
        "            floor = self.floor\n",
        Test(
            "tests/services/lighthouse/jobs/test_job_deletion.py::test_a_zombie_of_a_deleted_job_never_counts_as_equal"
        ),
    ),
)
