"""Variables of a Manager: each has its effect, or is refused by name."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from keepstep import Manager, ProcessGroupGloo
from keepstep.coordination import LighthouseServer
from keepstep.runtime.exits import EvictedExit
from keepstep_mesh.exit_codes import EXIT_EVICTED
from tests.services.manager.groups import manager


def test_without_any_address_the_error_says_what_to_set(monkeypatch):
    for name in ("KEEPSTEP_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="set KEEPSTEP_LIGHTHOUSE="):
        Manager(ProcessGroupGloo())


@pytest.mark.parametrize("prefix", ["KEEPSTEP", "TORCHFT"])
def test_the_quorum_timeout_of_the_environment_is_the_one_in_force(monkeypatch, prefix):
    server = LighthouseServer("127.0.0.1:0", min_replicas=2)
    monkeypatch.setenv(f"{prefix}_QUORUM_TIMEOUT_SEC", "0.3")
    monkeypatch.setenv(f"{prefix}_LIGHTHOUSE", server.address())
    try:
        m = Manager(ProcessGroupGloo(), lambda _: None, dict, replica_id="a", init_sync=False)
        try:
            for _ in range(2):  # still usable: it asks again
                m.start_quorum()
                with pytest.raises(TimeoutError, match=r"1 of at least 2 groups|has just taken over"):
                    m.wait_quorum()
        finally:
            m.shutdown()
    finally:
        server.shutdown()


def test_the_launcher_is_told_the_incarnation_of_a_name_that_a_script_gives(monkeypatch, lighthouse, tmp_path):
    monkeypatch.setenv("REPLICA_GROUP_ID", "1")
    monkeypatch.setenv("KEEPSTEP_NAME_FILE", str(tmp_path / "r1"))
    with manager(lighthouse, "train_ddp_1") as one:
        assert (tmp_path / "r1").read_text() == one.replica_id()
        assert one.replica_id().startswith("train_ddp_1:")


def test_a_launcher_that_cannot_be_told_the_name_is_no_reason_not_to_train(monkeypatch, lighthouse, tmp_path):
    monkeypatch.setenv("KEEPSTEP_NAME_FILE", str(tmp_path / "nowhere" / "r1"))
    with manager(lighthouse, "a") as one:
        one.start_quorum()
        assert one.should_commit()


def test_the_variable_of_the_durable_relays_overrides_the_argument(monkeypatch, lighthouse):
    monkeypatch.setenv("KEEPSTEP_DURABLE_RELAYS", "http://a:1, http://b:1")
    with manager(lighthouse, "a", durable_relays="http://c:1") as one:
        assert one._settings.durable.relays == ("http://a:1", "http://b:1")


def test_an_evicted_rank_says_so_before_it_ends(capsys):
    with pytest.raises(SystemExit) as ended:
        raise EvictedExit("bad GPU")
    assert ended.value.code == EXIT_EVICTED
    assert capsys.readouterr().err == "keepstep: this group was evicted: bad GPU; its ranks end (exit 77)\n"


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"KEEPSTEP_TIMEOUT_SEC": "soon"}, {}, "KEEPSTEP_TIMEOUT_SEC='soon' must be a positive number of seconds"),
        ({"KEEPSTEP_TIMEOUT_SEC": "1e300"}, {}, "KEEPSTEP_TIMEOUT_SEC='1e300' must be a positive number of seconds"),
        ({"TORCHFT_TIMEOUT_SEC": "inf"}, {}, "TORCHFT_TIMEOUT_SEC='inf' must be a positive number of seconds"),
        ({"TORCHFT_MANAGER_PORT": "http"}, {}, "TORCHFT_MANAGER_PORT='http' must be a whole number"),
        ({"KEEPSTEP_MANAGER_PORT": "70000"}, {}, r"port=70000 \(KEEPSTEP_MANAGER_PORT\) must be in"),
        ({"KEEPSTEP_QUORUM_RETRIES": "-1"}, {}, "quorum_retries=-1 must be at least 0"),
        ({}, {"quorum_retries": -1}, "quorum_retries=-1 must be at least 0"),
        ({}, {"quorum_timeout": timedelta(seconds=-1)}, r"quorum_timeout=-1 day, 23:59:59 must be positive"),
        ({"MASTER_PORT": "tcp://10.0.0.1:1"}, {"world_size": 2}, r"MASTER_PORT='tcp://10.0.0.1:1' must be a whole"),
        ({"WORLD_SIZE": "two"}, {}, "WORLD_SIZE='two' must be a whole number; torchrun"),
    ],
)
def test_a_number_that_makes_no_sense_is_named(monkeypatch, lighthouse, variables, arguments, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Manager(ProcessGroupGloo(), lighthouse_addr=lighthouse, **arguments)


def test_a_lighthouse_whose_name_is_not_known_yet_is_looked_for_until_the_connect_timeout():
    limit = timedelta(seconds=0.5)
    with pytest.raises(TimeoutError, match=r"host missing\.invalid not found"):
        Manager(ProcessGroupGloo(), lighthouse_addr="http://missing.invalid:1", connect_timeout=limit)


def test_a_lighthouse_and_a_port_that_are_given_are_not_those_of_the_environment(lighthouse, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_LIGHTHOUSE", "http://127.0.0.1:9")
    monkeypatch.setenv("KEEPSTEP_MANAGER_PORT", "1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with manager(lighthouse, "a", port=port, hostname="127.0.0.1") as m:
        m.start_quorum()
        assert m.should_commit()
        socket.create_connection(("127.0.0.1", port), timeout=30).close()


OVERRIDES = {"TIMEOUT_SEC": 1.5, "QUORUM_TIMEOUT_SEC": 2.5, "CONNECT_TIMEOUT_SEC": 3.5}


@pytest.mark.parametrize("prefix", ["KEEPSTEP", "TORCHFT"])
def test_every_override_of_the_environment_reaches_where_the_value_is_used(lighthouse, monkeypatch, prefix):
    for name, value in OVERRIDES.items():
        monkeypatch.setenv(f"{prefix}_{name}", str(value))
    monkeypatch.setenv(f"{prefix}_QUORUM_RETRIES", "4")
    with manager(lighthouse, "a") as m:
        assert (m._settings.timeout, m._settings.quorum_timeout) == (timedelta(seconds=1.5), timedelta(seconds=2.5))
        assert (m._context.settings.session.connect_timeout, m._context.settings.quorum_retries) == (3.5, 4)
        assert m._context.reconfigurer._timeout == timedelta(seconds=1.5)
        assert m._context.transport.direct.server._timeout == 1.5
        m.start_quorum()
        assert m.steps.attempt is not None
        assert m.steps.attempt._timeout == 2.5
        assert m.should_commit()
