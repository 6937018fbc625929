"""The configuration of a run of Ray Train, with Ray from PyPI."""

from __future__ import annotations

import pytest

pytest.importorskip("ray.train.v2.torch.torchft_config", reason="ray is not installed: pip install -e '.[ray]'")

from keepstep.integrations.ray import KeepstepConfig


@pytest.fixture(autouse=True)
def _no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEEPSTEP_TOKEN", "KEEPSTEP_ADMIN_TOKEN", "KEEPSTEP_SERVICE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_a_lighthouse_of_the_run_has_a_random_token_that_no_one_sees() -> None:
    one, other = KeepstepConfig(), KeepstepConfig()
    token = one.worker_environment["KEEPSTEP_TOKEN"]
    assert one.lighthouse_environment == {"KEEPSTEP_WORKER_TOKEN": token}
    assert len(token) == 64
    assert token != other.worker_environment["KEEPSTEP_TOKEN"]
    assert token not in f"{one!r} {one.to_dict()}"


def test_tokens_come_from_the_argument_or_the_process_that_starts_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_TOKEN", "t" * 16)
    monkeypatch.setenv("KEEPSTEP_ADMIN_TOKEN", "a" * 16)
    config = KeepstepConfig()
    assert config.worker_environment == {"KEEPSTEP_TOKEN": "t" * 16}
    assert config.lighthouse_environment == {"KEEPSTEP_WORKER_TOKEN": "t" * 16, "KEEPSTEP_ADMIN_TOKEN": "a" * 16}
    assert KeepstepConfig(token="x" * 16).worker_environment == {"KEEPSTEP_TOKEN": "x" * 16}


def test_workers_of_a_lighthouse_that_runs_already_use_the_token_of_their_node() -> None:
    config = KeepstepConfig("l1:29510,http://l2:29510", backend="gloo")
    assert config.lighthouse == "http://l1:29510,http://l2:29510"
    assert config.worker_environment == {}
    assert config.backend == "gloo"


def test_a_lighthouse_that_runs_already_takes_no_arguments() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        KeepstepConfig("http://l1:29510", lighthouse_kwargs={"min_replicas": 2})
    with pytest.raises(ValueError, match="is no address"):
        KeepstepConfig("l1")
