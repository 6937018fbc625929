"""A user's tests with a mock in place of the Manager: all parts of keepstep run on torchft's public methods."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, Mock, create_autospec

import pytest
import torch
from torch import nn

from keepstep import (
    DistributedDataParallel,
    ManagedProcessGroup,
    Manager,
    OptimizerWrapper,
    PureDistributedDataParallel,
)
from keepstep.device_mesh import all_reduce_hook
from keepstep.local_sgd import DiLoCo, LocalSGD
from keepstep.process_group.works import CompletedWork


def manager_of_a_test() -> MagicMock:
    """``create_autospec(Manager)`` whose ``allreduce`` has the parameters of torchft's, and changes nothing."""
    manager: MagicMock = create_autospec(Manager)

    def allreduce(tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = None) -> CompletedWork:
        del should_quantize, reduce_op
        return CompletedWork(tensor)

    manager.allreduce.side_effect = allreduce
    manager.errored.return_value = None
    return manager


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.rand(5, 3)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("wrap", [DistributedDataParallel, PureDistributedDataParallel])
def test_gradients_and_buffers_go_through_the_allreduce_of_a_mock(wrap: Any) -> None:
    manager, inner = manager_of_a_test(), model()
    wrap(manager, inner)(torch.rand(5, 3)).sum().backward()
    assert all(one.grad is not None for one in inner.parameters())
    assert manager.allreduce.call_count >= 2


def test_ddp_calls_a_fake_allreduce_that_takes_nothing_but_the_tensor() -> None:
    manager, module = create_autospec(Manager), nn.Linear(3, 2)
    manager.allreduce = CompletedWork
    DistributedDataParallel(manager, module)(torch.rand(5, 3)).sum().backward()
    assert all(one.grad is not None for one in module.parameters())


@pytest.mark.parametrize("commits", [True, False])
def test_an_optimizer_steps_if_should_commit_of_the_mock_says_so(commits: bool) -> None:
    manager, module = manager_of_a_test(), model()
    manager.should_commit.return_value = commits
    optimizer = OptimizerWrapper(manager, torch.optim.AdamW(module.parameters()))
    before, statistics = module[0].weight.detach().clone(), module[1].running_mean.clone()
    train(DistributedDataParallel(manager, module), optimizer)
    assert optimizer.manager is manager
    assert manager.start_quorum.call_count == manager.should_commit.call_count == 1
    assert module[0].weight.equal(before) is not commits
    assert not module[1].running_mean.equal(statistics)


@pytest.mark.parametrize("commits", [True, False])
def test_local_sgd_averages_if_should_commit_of_the_mock_says_so(commits: bool) -> None:
    manager, module = manager_of_a_test(), nn.Linear(3, 2)
    manager.should_commit.return_value = commits
    manager.allreduce.side_effect = lambda tensor: CompletedWork(tensor.zero_())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with LocalSGD(manager, module, optimizer, sync_every=2):
        train(module, optimizer, 3)
        assert manager.start_quorum.call_count == manager.should_commit.call_count == 1
        train(module, optimizer, 1)
    assert manager.should_commit.call_count == 2
    assert (not module.weight.any()) is commits


@pytest.mark.parametrize("buckets", [True, False])
def test_diloco_steps_its_outer_optimizer_on_a_mock(buckets: bool) -> None:
    manager, module = manager_of_a_test(), nn.Linear(3, 2)
    inner = torch.optim.AdamW(module.parameters())
    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9)
    with DiLoCo(manager, [module], inner, outer, sync_every=2, use_bucketization=buckets):
        train(module, inner, 2)
    assert manager.start_quorum.call_count == manager.should_commit.call_count == 1
    assert manager.allreduce.call_count == (1 if buckets else 2)
    assert len(outer.state) == 2


def test_a_managed_group_and_the_hook_of_hsdp_take_a_mock() -> None:
    manager = Mock(spec=Manager)
    manager.num_participants.return_value = 3
    manager.allreduce.side_effect = lambda tensor, **_: CompletedWork(tensor)
    group = ManagedProcessGroup(manager)
    assert group.size() == 3
    assert group.allreduce([torch.ones(2)]).wait()
    all_reduce_hook(manager)(torch.ones(2))
    assert manager.allreduce.call_count == 2
    gathered, given = [torch.zeros(2) for _ in range(3)], torch.full((2,), 7.0)
    assert group.allgather([gathered], [given]).wait()
    assert gathered[0].equal(given), "a mock does not say which group this is, so it is the first one"
    assert group.broadcast_one(given, 0).wait()
    assert given.sum() == 14


def test_what_a_mock_cannot_do_is_refused() -> None:
    module = nn.Linear(3, 2)
    manager = manager_of_a_test()
    manager.use_async_quorum = True
    with pytest.raises((TypeError, ValueError), match="catch_up=True needs"):
        OptimizerWrapper(manager, torch.optim.SGD(module.parameters()), catch_up=True)


class Logged:
    """Passes everything on to a Manager, as a user's class may."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class Thin:
    """A user's class with methods of torchft only."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def start_quorum(self) -> None:
        self._manager.start_quorum()

    def allreduce(self, tensor: torch.Tensor) -> Any:
        return self._manager.allreduce(tensor)

    def should_commit(self) -> bool:
        return bool(self._manager.should_commit())

    def errored(self) -> None:
        return None


def test_a_class_that_hides_its_manager_is_logged_once_and_a_mock_is_not(caplog) -> None:
    def train_with(manager: Any) -> None:
        module = nn.Linear(3, 2)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(module.parameters()))
        train(DistributedDataParallel(manager, module), optimizer)

    mock = manager_of_a_test()
    train_with(mock)
    assert not caplog.records
    train_with(Thin(mock))
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("object in place of a Manager: groups do not compare the script")
    assert ".Thin" in line
    assert "let its __getattr__ return every other attribute from the Manager inside it" in line


def test_an_object_that_passes_everything_on_keeps_the_checks_of_its_manager() -> None:
    from keepstep.lifecycle.manager_like import as_manager
    from keepstep.lifecycle.steps import Steps

    real: Any = Mock()
    real.steps = Steps.__new__(Steps)
    logged: Any = Logged(real)
    assert as_manager(logged) is logged
