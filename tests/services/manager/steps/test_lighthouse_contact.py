"""A Manager and its lighthouse: none there, one that cannot answer, one that comes back, and the end."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import urllib.request
from datetime import timedelta

import pytest
import torch

from keepstep import Manager, ProcessGroupGloo
from keepstep.coordination import LighthouseServer
from keepstep.manager import running_managers
from keepstep.runtime.exits import EvictedExit
from keepstep_mesh.errors import Drained, KeepstepError
from keepstep_mesh.protocol.messages import ServiceAddress
from tests.services.manager.groups import SECOND, manager


def test_no_lighthouse_is_a_timeout_that_names_it(monkeypatch):
    monkeypatch.setenv("KEEPSTEP_CONNECT_TIMEOUT_SEC", "0.4")
    with pytest.raises(TimeoutError, match=r"127\.0\.0\.1:9"):
        Manager(ProcessGroupGloo(), lighthouse_addr="http://127.0.0.1:9", replica_id="a")


def test_a_job_whose_name_is_none_is_an_error_at_once_in_the_lighthouses_words(monkeypatch):
    monkeypatch.setenv("KEEPSTEP_JOB", "no such name")
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    try:
        with pytest.raises(KeepstepError, match="invalid job name 'no such name'"):
            Manager(ProcessGroupGloo(), lighthouse_addr=server.address(), replica_id="a")
    finally:
        server.shutdown()


def test_an_asynchronous_quorum_that_fails_rejects_the_step_only(monkeypatch):
    server = LighthouseServer("127.0.0.1:0", min_replicas=2)
    try:
        with manager(server.address(), "a", quorum_timeout=timedelta(milliseconds=300), init_sync=False) as m:
            m.start_quorum()
            assert not m.allreduce(torch.ones(1)).wait()
            assert not m.should_commit()
            ready = threading.Barrier(2)

            def second() -> bool:
                with manager(server.address(), "b", init_sync=False) as other:
                    ready.wait(30)
                    other.start_quorum()
                    committed = other.should_commit()
                    ready.wait(30)
                    return committed

            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                theirs = pool.submit(second)
                ready.wait(30)
                m.start_quorum(timeout=20 * SECOND)
                assert m.should_commit()
                ready.wait(30)
                assert theirs.result(30)
    finally:
        server.shutdown()


def test_once_the_lighthouse_is_back_the_same_manager_goes_on():
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    address = server.address()
    with manager(address, "a", quorum_timeout=timedelta(milliseconds=400), init_sync=False) as m:
        m.start_quorum()
        assert m.should_commit()
        server.shutdown()
        m.start_quorum()
        assert not m.should_commit()
        server = LighthouseServer(address.removeprefix("http://"), min_replicas=1)
        try:
            m.start_quorum(timeout=20 * SECOND)
            assert m.should_commit()
            assert m.current_step() == 2
        finally:
            m.shutdown()
            server.shutdown()


def test_the_manager_knows_the_services_that_registered(lighthouse):
    body = json.dumps({"address": "http://10.0.0.7:29520"}).encode()
    request = urllib.request.Request(f"{lighthouse}/v1/services/relay/relay-1", body, method="PUT")
    with urllib.request.urlopen(request, timeout=60):
        pass
    with manager(lighthouse, "a") as m:
        assert m.services == (ServiceAddress("relay", "relay-1", "http://10.0.0.7:29520"),)


def test_a_group_that_is_banned_when_it_reconnects_exits_as_evicted(lighthouse):
    with manager(lighthouse, "other", init_sync=False):
        body = json.dumps({"reason": "bad GPU", "ban_seconds": 500}).encode()
        order = urllib.request.Request(f"{lighthouse}/v1/jobs/default/replicas/a/evict", body, method="POST")
        with urllib.request.urlopen(order, timeout=60):
            pass
    first = LighthouseServer("127.0.0.1:0", min_replicas=1)
    with manager(f"{first.address()},{lighthouse}", "a", init_sync=False) as m:
        try:
            m.start_quorum()
            assert m.should_commit()
        finally:
            first.shutdown()
        m.start_quorum()
        assert not m.allreduce(torch.ones(1)).wait()
        with pytest.raises(EvictedExit, match="bad GPU") as end:
            m.should_commit()
        assert end.value.code == 77
        with pytest.raises(EvictedExit, match="bad GPU"):
            m.start_quorum()


def test_a_wish_to_leave_ends_at_the_next_step_with_exit_code_0(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        assert m.should_commit()
        m._membership.request_leave("SIGTERM")
        with pytest.raises(Drained) as left:
            m.start_quorum()
        assert left.value.code == 0


def test_shutdown_in_the_middle_of_a_step_frees_everything_and_twice_is_fine(lighthouse):
    m = Manager(ProcessGroupGloo(), lambda _: None, dict, lighthouse_addr=lighthouse, replica_id="a")
    m.start_quorum()
    m.num_participants()
    m.shutdown()
    m.shutdown()
    with pytest.raises((RuntimeError, KeepstepError)):
        m.start_quorum()


def test_a_group_leaves_after_its_step_when_a_launcher_asks_it_to(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        for one in running_managers():
            one.leave_soon("its node ends")
        assert m.should_commit()
        with pytest.raises(Drained, match="its node ends"):
            m.start_quorum()
    assert m not in running_managers()


def test_a_group_with_time_left_leaves_at_once_if_no_spare_can_replace_it(lighthouse):
    with manager(lighthouse, "a") as m:
        m.leave_soon("its node ends", notice=60 * SECOND)
        with pytest.raises(Drained, match="its node ends with 60 s of notice; no spare"):
            while True:
                m.start_quorum()
                m.should_commit()
