"""The configuration of a run of Ray Train, with Ray from PyPI."""

from __future__ import annotations

import pytest

pytest.importorskip("ray.train.v2.torch.torchft_config", reason="ray is not installed: pip install -e '.[ray]'")

import ray.train

from keepstep.integrations.ray import KeepstepConfig, TorchTrainer
from keepstep.integrations.ray.replica_groups import change_of_size
from keepstep_mesh.errors import AuthError


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


def test_mistakes_end_the_script_because_ray_would_retry_them_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuthError, match="at least 16"):
        KeepstepConfig(token="short")
    with pytest.raises(TypeError, match="min_replica"):
        KeepstepConfig(lighthouse_kwargs={"min_replica": 2})
    with pytest.raises(ValueError, match="spares=-1"):
        KeepstepConfig(spares=-1)
    with pytest.raises(ValueError, match="ranks=0"):
        KeepstepConfig(ranks=0)
    monkeypatch.setenv("KEEPSTEP_ADMIN_TOKEN", "t" * 16)
    with pytest.raises(AuthError, match="two roles have the same token"):
        KeepstepConfig(token="t" * 16)


def test_a_lighthouse_that_does_not_start_counts_in_the_max_failures_of_the_run() -> None:
    config = KeepstepConfig(lighthouse_kwargs={"min_replicas": 0})
    with pytest.raises(ray.train.WorkerGroupError, match=r"does not start: .*min_replicas"):
        config.backend_cls()._maybe_create_lighthouse_actor(config)


def test_each_worker_knows_the_number_of_spares() -> None:
    assert KeepstepConfig("l1:29510", spares=2).worker_environment == {"KEEPSTEP_SPARES": "2"}


@pytest.mark.parametrize("workers", [3, (2, 5), (1, 4), 0])
def test_a_run_has_whole_groups(workers: int | tuple[int, int]) -> None:
    scaling = ray.train.ScalingConfig(num_workers=workers)
    with pytest.raises(ValueError, match=r"num_workers=\(?\d.* multiples of 2"):
        TorchTrainer(lambda: None, torch_config=KeepstepConfig(ranks=2), scaling_config=scaling)


def test_datasets_are_refused_which_a_group_that_starts_again_would_wait_for() -> None:
    with pytest.raises(ValueError, match=r"datasets=\['train'\]: Ray divides them"):
        TorchTrainer(lambda: None, torch_config=KeepstepConfig(ranks=2), datasets={"train": object()})


def test_without_a_number_of_workers_a_run_has_one_group() -> None:
    assert TorchTrainer(lambda: None, torch_config=KeepstepConfig(ranks=4)).scaling_config.num_workers == 4


@pytest.mark.parametrize(
    ("groups", "stay", "leaving", "change"),
    [
        (3, {0: True, 1: True}, (), ([], [2])),
        (2, {0: True, 1: True, 2: True, 3: True}, (), ([2, 3], [])),
        (2, {0: True, 1: False, 2: True}, (), ([1], [])),
        (3, {0: True, 2: True}, (), ([], [1])),
        (2, {1: True, 0: False}, (2,), ([], [])),
        (3, {0: True, 1: True}, (2,), ([], [3])),
    ],
    ids=["grows", "shrinks", "loses one without workers first", "fills a gap", "one fails, one leaves", "grows again"],
)
def test_a_run_changes_its_size_by_whole_groups(
    groups: int, stay: dict[int, bool], leaving: tuple[int, ...], change: tuple[list[int], list[int]]
) -> None:
    assert change_of_size(groups, stay, {*stay, *leaving}) == change
