"""The torchx component: what it refuses, and what it asks of a scheduler."""

from __future__ import annotations

import importlib.util

import pytest

from keepstep.torchx import hsdp

NO_TORCHX = importlib.util.find_spec("torchx") is None


@pytest.fixture(autouse=True)
def no_lighthouse(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEEPSTEP_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("number", ["replicas", "workers_per_replica"])
def test_no_group_and_no_rank_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match=f"{number}=0 must be at least 1"):
        hsdp(**{number: 0})


def test_the_address_of_a_lighthouse_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no lighthouse address: pass --env KEEPSTEP_LIGHTHOUSE=http://host:29510"):
        hsdp()
    monkeypatch.setenv("KEEPSTEP_LIGHTHOUSE", "l1")
    with pytest.raises(ValueError, match="is no address"):
        hsdp()


@pytest.mark.skipif(not NO_TORCHX, reason="torchx is installed")
def test_without_torchx_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"keepstep\.torchx\.hsdp needs torchx: pip install"):
        hsdp(env={"KEEPSTEP_LIGHTHOUSE": "http://l1:29510"})


@pytest.mark.skipif(NO_TORCHX, reason="torchx is not installed")
def test_each_group_is_a_role_with_a_torchrun_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://of-the-caller:29510")
    given = {"KEEPSTEP_LIGHTHOUSE": "http://l1:29510"}
    app = hsdp("--steps", "9", replicas=2, workers_per_replica=4, max_restarts=3, script="a.py", env=given, gpu=4)
    assert [role.name for role in app.roles] == ["replica_0", "replica_1"]
    role = app.roles[1]
    assert (role.entrypoint, role.args[-3:]) == ("torchrun", ["a.py", "--steps", "9"])
    assert {"--nproc-per-node=4", "--max-restarts=3"} <= set(role.args)
    assert role.env["REPLICA_GROUP_ID"] == "1"
    assert role.env["NUM_REPLICA_GROUPS"] == "2"
    assert role.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert role.env["KEEPSTEP_LIGHTHOUSE"] == "http://l1:29510"
    assert (role.resource.gpu, role.max_retries) == (4, 3)
