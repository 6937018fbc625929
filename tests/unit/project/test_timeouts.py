"""How the limits of docs/timeouts.md depend on each other: over the real defaults."""

# ruff: noqa: SIM300 - a rule reads from the shorter limit to the longer one

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from keepstep.checkpoint import saving
from keepstep.checkpoint.managed import durable_upload, durable_writer, newest_checkpoint
from keepstep.checkpoint.places import at_relay, rank_files
from keepstep.group import group_server, slow_quorum_log
from keepstep.group.ranks import rank_link
from keepstep.manager import SHUTDOWN_SECONDS, Manager
from keepstep.relay_client import relay_link, upload_share
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS
from keepstep.session import message_channel, open_requests, session
from keepstep.session.session_settings import SessionSettings
from keepstep.step import healing, rank_votes
from keepstep.step.catching_up import catch_up
from keepstep.step.evidence import failure_evidence
from keepstep.transfer import state_transfer
from keepstep.transfer.relayed import relay_fetch, relay_upload
from keepstep_cli.asking import rest
from keepstep_cli.running.supervisor_events import Restarts
from keepstep_lighthouse.api import event_stream
from keepstep_lighthouse.jobs import job_endings, sessions
from keepstep_lighthouse.leadership import leader_link, term
from keepstep_lighthouse.quorum.presence import health
from keepstep_lighthouse.settings import MIN_LEASE, LighthouseSettings
from keepstep_lighthouse.store import etcd_store, sqlite_store
from keepstep_mesh.discovery import registration
from keepstep_mesh.net import lighthouse_addresses
from keepstep_mesh.protocol.policy import MIN_HEARTBEAT_TIMEOUT, Policy
from keepstep_mesh.serving import open_port, service
from keepstep_mesh.threads import ending, starting, watchdog
from keepstep_relay import checkpoint_store
from keepstep_relay.api import exchange
from keepstep_relay.app import FLUSH_RECORDS_SECONDS
from keepstep_relay.core.events import Limits
from keepstep_relay.processes import further_process, main_process
from keepstep_relay.settings import RelaySettings

ROOT = Path(__file__).resolve().parents[3]
POLICY, RESTARTS, UPLOADS, RELAY = Policy(), Restarts(), Limits(), RelaySettings()
LEASE = LighthouseSettings().lease
BEAT = SessionSettings((), "", "").heartbeat_interval
TTL = registration.Registration("relay", "", "").ttl
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
STOP_GRACE = min(float(one["stop_grace_period"].removesuffix("s")) for one in COMPOSE["services"].values())


def of_manager(name: str) -> float:
    """A default of ``Manager``, in seconds."""
    seconds: float = inspect.signature(Manager.__init__).parameters[name].default.total_seconds()
    return seconds


def renewals_before_the_end(lease: float) -> int:
    """Renewals that a leader can send one after the other, each as slow as may be, before it has to stop."""
    started, sent = lease / 3, 0
    while started + etcd_store.CALL_SECONDS < 0.9 * lease:
        sent += 1
        started += etcd_store.CALL_SECONDS + lease / 20
    return sent


RULES = {
    # Each rule has the reason before it, where its name does not say it.
    # a group that dies or is silent
    # one lost or late heartbeat must not cost a group
    "ten heartbeats fit into the timeout": 10 * BEAT <= POLICY.heartbeat_timeout,
    # a lighthouse that was paused gives groups more time
    "the smallest timeout allowed leaves room for a tick that is late": (
        MIN_HEARTBEAT_TIMEOUT <= health.LATE_TICK_SECONDS < POLICY.heartbeat_timeout
    ),
    # a broken connection is better evidence than silence
    "a broken connection is judged before a silent one": POLICY.reconnect_grace < POLICY.heartbeat_timeout,
    # a short fault of the network must not cost a step
    "a broken connection is retried twice within the grace": (
        2 * lighthouse_addresses.PASS_BACKOFF.first < POLICY.reconnect_grace
    ),
    # the lighthouse ends the step early
    "a lost group is known before a collective times out": (
        POLICY.heartbeat_timeout + POLICY.reconnect_grace < of_manager("timeout")
    ),
    # a link that flaps may work again when the step fails
    "a step without progress is probed before its collective times out": (
        (failure_evidence.STALLED_PART + 1 / failure_evidence.LOOKS) * of_manager("timeout")
        + failure_evidence.REACH_SECONDS
        < of_manager("timeout")
    ),
    "a rank sends four heartbeats before it counts as silent": 4 * rank_link.RANK_BEAT < rank_link.RANK_SILENCE,
    # the others wait for a group that hangs
    "a process that cannot start a thread ends before a collective times out": (
        starting.THREAD_START_SECONDS + 2 * watchdog.WATCHDOG_TURN_SECONDS + ending.EXIT_OUTPUT_SECONDS
        < of_manager("timeout")
    ),
    # the group fails as a whole, with a reason
    "a dead rank is known before a collective times out": (
        max(rank_link.RANK_SILENCE, POLICY.heartbeat_timeout) < of_manager("timeout")
    ),
    # the quorum
    # otherwise the groups that wait give up before the quorum forms
    "a request outlives the wait for missing groups": POLICY.join_timeout <= of_manager("quorum_timeout"),
    "a request outlives the wait for a heal": POLICY.heal_timeout <= of_manager("quorum_timeout"),
    # the log says what the quorum waits for
    "a reason is logged before the request times out": (
        slow_quorum_log.SLOW_QUORUM_SECONDS + slow_quorum_log.ANSWER_SECONDS < of_manager("quorum_timeout")
    ),
    # they wait as long as it does, and not for one that hangs
    "a rank that waits for its state in a catch-up says so before the other ranks give it up": (
        catch_up.RANK_WAIT_SECONDS < rank_votes.POLL_TIMEOUTS * of_manager("timeout")
    ),
    # late heals get more time, broken ones do not
    "the lighthouse sees a late heal, not a broken one": (0 < healing.GIVE_UP_SECONDS < POLICY.heal_timeout),
    # the session
    # one frozen lighthouse must not use up the limit
    "a session outlives the search for a lighthouse": (
        lighthouse_addresses.SESSION_CONNECT_SECONDS + session.WELCOME_SECONDS < of_manager("connect_timeout")
    ),
    # the worker decides, and knows the reason
    "the lighthouse waits for a hello longer than a worker for its welcome": (
        session.WELCOME_SECONDS < sessions.HELLO_SECONDS
    ),
    # idle connections are closed, slow ones are not
    "a slow connection is not closed while it connects": (
        lighthouse_addresses.SESSION_CONNECT_SECONDS < open_port.FIRST_REQUEST_SECONDS
    ),
    # the inner limit has the reason in its error
    "a call from another thread outlives what it calls": (
        lighthouse_addresses.SESSION_CONNECT_SECONDS + session.WELCOME_SECONDS + open_requests.ANSWER_MARGIN
        < CALL_MARGIN_SECONDS
        and message_channel.CLOSE_SECONDS < CALL_MARGIN_SECONDS
    ),
    # a lighthouse that dies
    # a failover must not cost a group
    "groups are back before a new leader judges them": (
        lighthouse_addresses.PASS_BACKOFF.most < (POLICY.takeover_grace or POLICY.heartbeat_timeout)
    ),
    # otherwise the link is useless
    "the link of a standby notices a frozen leader before the lease ends": (
        3 * leader_link.BEAT_SECONDS < leader_link.SILENCE < LEASE
    ),
    # one slow call to etcd must not cost the lead
    "a leader has two slow tries to renew its lease": renewals_before_the_end(LEASE) >= 2,
    "the smallest lease allowed is longer than a call to the store": etcd_store.CALL_SECONDS < MIN_LEASE <= LEASE,
    # one endpoint of etcd may be down
    "a write outlives calls to several endpoints, and waits for locks": (
        max(2 * etcd_store.CALL_SECONDS, sqlite_store.STORE_LOCK_SECONDS) < term.STORE_TIMEOUT
    ),
    # `keepstep events --follow` goes on
    "a follower of events outlives a change of leader": LEASE < rest.FOLLOW_PATIENCE_SECONDS,
    # one lost packet must not end it
    "a follower of events misses two keepalives before it gives up": (
        2 * event_stream.KEEPALIVE_SECONDS < rest.SILENCE_SECONDS
    ),
    # relay and registration
    # one slow request must not unregister it
    "a service has two tries to renew its registration": (
        TTL / 3 + 2 * min(registration.REGISTRATION_SECONDS, TTL / 3) <= TTL
    ),
    # the reader knows that the relay lives
    "the relay answers that a chunk is not there yet before its reader gives up": (
        relay_fetch.CHUNK_WAIT_SECONDS < relay_fetch.FETCH_PATIENCE_SECONDS
        and relay_fetch.CHUNK_WAIT_SECONDS <= RELAY.max_wait
    ),
    # every other way is tried first
    "a reader asks the source before it counts a transfer as lost": (
        relay_fetch.FETCH_PATIENCE_SECONDS < relay_fetch.LOST_SECONDS < POLICY.heal_timeout
    ),
    # a frozen peer must not cost the heal
    "a connection that stalls is replaced before the heal is late": (
        state_transfer.STALL_SECONDS < POLICY.heal_timeout and state_transfer.STALL_SECONDS < RELAY.body_timeout
    ),
    # its clients must connect to another process
    "a frozen process of a relay is replaced before the relay aborts the uploads that it served": (
        (main_process.MAX_LOST_PINGS + 1) * main_process.PROCESS_PING_SECONDS < UPLOADS.upload_seconds
    ),
    # a graceful stop breaks few transfers
    "the processes of a relay finish open requests before they are killed": (
        further_process.FINISH_SECONDS < main_process.STOP_PROCESS_SECONDS < service.STOP_SECONDS
    ),
    # a short fault must not abort an upload
    "an upload reconnects before the relay aborts it": (
        relay_upload.STALL_SECONDS + relay_link.REQUEST_BACKOFF.most < UPLOADS.upload_seconds
        and relay_upload.END_SECONDS < UPLOADS.upload_seconds
    ),
    # the relay must not drop what a joiner reads
    "a checkpoint is kept while a heal may read it": POLICY.heal_timeout <= UPLOADS.reading_seconds,
    # checkpoints
    # a short fault must not cost a checkpoint
    "the writer of a durable checkpoint reconnects before the write fails": (
        durable_upload.DURABLE_STALL_SECONDS + relay_link.REQUEST_BACKOFF.most
        < min(of_manager("timeout"), UPLOADS.upload_seconds)
    ),
    "the share of a dead group is uploaded before the write fails": (
        upload_share.UPLOAD_PATIENCE_SECONDS < of_manager("timeout")
    ),
    # a slow disk is not a failure
    "a relay finishes a commit before its writer gives up": (
        checkpoint_store.COMMIT_SECONDS <= durable_upload.COMMIT_SECONDS <= saving.TIMEOUT.total_seconds()
    ),
    # training must not wait for it
    "a copy or a failing relay costs a step less than a write": (
        max(durable_upload.COPY_PATIENCE_SECONDS, durable_writer.FAILING_WAIT_SECONDS) < of_manager("timeout")
    ),
    # other ranks learn of failures at once
    "the writer ends after its last messages": (
        durable_upload.DURABLE_ABORT_SECONDS < durable_writer.WRITER_END_SECONDS
    ),
    # one slow answer must not cost newer steps
    "a resume asks a silent relay twice": (
        2 * newest_checkpoint.LIST_SECONDS + newest_checkpoint.FIND_PAUSE_SECONDS < of_manager("resume_wait")
    ),
    # a frozen relay must not fail a resume
    "a load turns to another relay before it fails": relay_link.PATIENCE_SECONDS < of_manager("timeout"),
    # a save waits for slow ranks, not for dead ones
    "a rank that waits for others counts as alive": (
        exchange.SIGN_OF_LIFE_SECONDS < UPLOADS.upload_seconds and at_relay.WAIT_SECONDS < UPLOADS.upload_seconds
    ),
    # the rank knows that the relay lives
    "the relay answers a wait before its rank counts the connection as broken": (
        at_relay.WAIT_SECONDS < relay_link.PATIENCE_SECONDS
    ),
    # they raise its reason
    "the error of a rank reaches the others before their save ends": (
        max(at_relay.FAIL_SECONDS, rank_files.STALE_SECONDS) < rank_files.OLD_SECONDS < saving.TIMEOUT.total_seconds()
    ),
    # the end
    # a graceful leave costs the others nothing
    "a group leaves before its launcher kills it": (
        max(SHUTDOWN_SECONDS, group_server.LEAVE_PATIENCE + group_server.LEAVE_SECONDS) + ending.EXIT_OUTPUT_SECONDS
        < RESTARTS.grace
    ),
    # others stop using it at once
    "a service says goodbye before it is cut off": (
        registration.DEREGISTER_SECONDS + FLUSH_RECORDS_SECONDS < service.STOP_SECONDS
    ),
    # docker's SIGKILL must be the last resort
    "docker waits for services and launchers": max(service.STOP_SECONDS, RESTARTS.grace) < STOP_GRACE,
    # only abandoned jobs are deleted
    "a job outlives everything that may keep its groups away": (
        10 * max(job_endings.EXPIRY_CHECK_SECONDS, POLICY.join_timeout, POLICY.heal_timeout, RESTARTS.backoff.most)
        < POLICY.job_ttl
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_limits_keep_their_order(rule: str) -> None:
    assert RULES[rule], rule


def test_no_time_has_the_name_of_another_with_a_different_value() -> None:
    values = defaultdict(set)
    for path in [*(ROOT / "libs").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if re.search(r"SECONDS|TIMEOUT|GRACE|LEASE|BACKOFF", name):
                    values[name].add(ast.unparse(node.value))
    assert {name: of_it for name, of_it in values.items() if len(of_it) > 1} == {}
