"""The wrappers of a model and an optimizer: gradients of all groups, steps that must not happen."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, PureDistributedDataParallel
from keepstep_mesh.errors import KeepstepError
from tests.services.manager.groups import events, manager, refusal, together


@pytest.mark.parametrize("others", [(), (3,)], ids=["only", "first-of-two"])
def test_a_model_that_does_not_fit_the_job_is_refused_with_the_first_difference(lighthouse, others):
    def wrap(*inputs: int) -> Callable[[Manager], object]:
        return lambda m: [DistributedDataParallel(m, nn.Linear(one, 2)) for one in inputs]

    message = refusal(lighthouse, wrap(4, *others), wrap(5, *others))
    assert "here 'weight (2, 5) torch.float32 cpu'" in message
    assert "'weight (2, 4) torch.float32 cpu'" in message


def _image_model(*, channels_last: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 3, 2), nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(2, 1))
    return model.to(memory_format=torch.channels_last) if channels_last else model


def test_a_model_whose_parameters_lie_in_memory_in_another_order_is_refused(lighthouse):
    def wrap(*, channels_last: bool) -> Callable[[Manager], object]:
        return lambda m: DistributedDataParallel(m, _image_model(channels_last=channels_last))

    message = refusal(lighthouse, wrap(channels_last=False), wrap(channels_last=True))
    assert "here '0.weight (3, 4, 2, 2) torch.float32 cpu strides (16, 1, 8, 4)', in a " in message
    assert "'0.weight (3, 4, 2, 2) torch.float32 cpu'" in message


def test_a_wrapper_that_averages_each_parameter_averages_equal_elements_in_any_order_of_memory(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, *, channels_last: bool) -> list[torch.Tensor]:
        model = _image_model(channels_last=channels_last)
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ready.wait(30)
            m.start_quorum()
            PureDistributedDataParallel(m, model)(torch.arange(16.0).view(1, 4, 2, 2)).sum().backward()
            assert m.should_commit()
            ready.wait(30)
            return [one.grad.contiguous() for one in model.parameters() if one.grad is not None]

    alone = _image_model(channels_last=False)
    alone(torch.arange(16.0).view(1, 4, 2, 2)).sum().backward()
    for gradients in together(lambda: group("a", channels_last=False), lambda: group("b", channels_last=True)):
        torch.testing.assert_close(gradients, [one.grad for one in alone.parameters()])


@pytest.mark.parametrize("pure", [False, True])
def test_gradients_are_averaged_over_the_groups(lighthouse, pure):
    ready = threading.Barrier(2)

    def group(name: str, scale: float) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1, bias=False)
        state_fns = {"min_replica_size": 2, "init_sync": False}
        with manager(lighthouse, name, **state_fns) as m:
            wrapped = PureDistributedDataParallel(m, model) if pure else DistributedDataParallel(m, model)
            optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=0.0))
            ready.wait(30)
            optimizer.zero_grad()
            wrapped(torch.full((1, 3), scale)).sum().backward()
            committed = optimizer.step()
            ready.wait(30)
            return committed, model.weight.grad.tolist()

    assert together(lambda: group("a", 1.0), lambda: group("b", 3.0)) == [(True, [[2.0] * 3])] * 2


@pytest.mark.parametrize("pure", [False, True])
def test_when_the_backward_pass_returns_the_gradients_are_those_of_all_groups(lighthouse, pure):
    ready, gone_on = threading.Barrier(2), threading.Event()

    def group(name: str, scale: float) -> float:
        model = nn.Linear(500, 1, bias=False)
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            wrapped = PureDistributedDataParallel(m, model) if pure else DistributedDataParallel(m, model)
            ready.wait(30)
            m.start_quorum()
            m.wait_quorum()
            if name == "b":
                gone_on.wait(0.3)  # it does not: it waits for us
            wrapped(torch.full((1, 500), scale)).sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            gone_on.set()
            assert m.should_commit()
            ready.wait(30)
            return norm

    norms = together(lambda: group("a", 1.0), lambda: group("b", 3.0))
    assert norms == pytest.approx([2.0 * 500**0.5] * 2)


def test_an_unused_parameter_counts_with_a_gradient_of_zero_in_every_group(lighthouse):
    ready = threading.Barrier(2)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
            return self.right(x) if right else self.left(x)

    def group(name: str, right: bool) -> list[float]:
        model = Branches()
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ddp = DistributedDataParallel(m, model)
            ready.wait(30)
            m.start_quorum()
            ddp(torch.full((1, 1), 4.0), right).sum().backward()
            assert m.should_commit()
            ready.wait(30)
            return [p.grad.item() for p in model.parameters()]

    assert together(lambda: group("a", False), lambda: group("b", True)) == [[2.0, 2.0]] * 2


def test_groups_that_take_different_branches_never_average_one_parameter_with_another(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, branch: int) -> list[float]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            PureDistributedDataParallel(m, model)
            ready.wait(30)
            m.start_quorum()
            model[branch](torch.full((1, 1), 4.0)).sum().backward()
            assert m.should_commit()
            ready.wait(30)
            return [p.grad.item() for p in model.parameters()]

    assert together(lambda: group("a", 0), lambda: group("b", 1)) == [[2.0, 2.0]] * 2


def test_no_sync_accumulates_and_the_last_pass_averages_all(lighthouse):
    model = nn.Linear(1, 1, bias=False)
    with manager(lighthouse, "a") as m:
        ddp = DistributedDataParallel(m, model)
        m.start_quorum()
        with ddp.no_sync():
            ddp(torch.ones(1, 1)).sum().backward()
        ddp(torch.ones(1, 1)).sum().backward()
        assert m.should_commit()
        assert model.weight.grad.item() == 2.0


def test_a_backward_pass_that_raised_does_not_keep_the_next_from_averaging(lighthouse):
    class OutOfMemory(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, _gradient):
            raise MemoryError

    model = nn.Linear(1, 1, bias=False)
    with manager(lighthouse, "a") as m:
        pure = PureDistributedDataParallel(m, model)
        m.start_quorum()
        x = OutOfMemory.apply(torch.ones(1, 1, requires_grad=True))
        with pytest.raises(MemoryError):
            pure(x).sum().backward()
        assert m.should_commit()
        m.start_quorum()
        with unittest.mock.patch.object(m, "allreduce", wraps=m.allreduce) as averaged:
            pure(torch.ones(1, 1)).sum().backward()
        assert [one.args[0].numel() for one in averaged.call_args_list] == [1, 1], "the flag of the weight, and it"
        assert m.should_commit()


FIRST_WRAP_OF_A_PROCESS = """
import sys, torch
from keepstep import DistributedDataParallel, Manager, ProcessGroupGloo
manager = Manager(ProcessGroupGloo(), lighthouse_addr=sys.argv[1], replica_id="a")
model = torch.nn.Linear(1, 1)
before = torch.get_rng_state()
with torch.no_grad():
    ddp = DistributedDataParallel(manager, model)
assert torch.equal(torch.get_rng_state(), before), "the random generator moved"
manager.start_quorum()
ddp(torch.ones(1, 1)).sum().backward()
assert manager.should_commit()
manager.shutdown()
"""


def test_wrapping_a_model_leaves_the_random_generator_alone_needs_no_gradients_and_no_warning_follows(lighthouse):
    done = subprocess.run(
        [sys.executable, "-c", FIRST_WRAP_OF_A_PROCESS, lighthouse],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "find_unused_parameters" not in done.stderr


def test_batch_norm_with_several_buckets_trains_and_stays_equal(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, seed: int) -> list[float]:
        torch.manual_seed(seed)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64))]
        model = nn.Sequential(*layers)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state)

        with manager(lighthouse, name, min_replica_size=2) as m:
            m.set_state_dict_fns(load, model.state_dict)
            ddp = DistributedDataParallel(m, model, bucket_cap_mb=0.02)
            optimizer = Optimizer(m, sgd)
            ready.wait(30)
            for _ in range(5):
                optimizer.zero_grad()
                ddp(torch.randn(8, 64)).square().sum().backward()
                assert optimizer.step(), m.errored()
            ready.wait(30)
            return [tensor.double().sum().item() for tensor in model.state_dict().values()]

    a, b = together(lambda: group("a", 1), lambda: group("b", 2))
    assert a == b


def test_an_optimizer_step_says_whether_it_stepped(lighthouse):
    model = nn.Linear(1, 1, bias=False)
    with manager(lighthouse, "a", min_replica_size=1) as m:
        optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=1.0))
        before = model.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        m.report_error(RuntimeError("no"))
        assert optimizer.step() is False
        assert model.weight.item() == before
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        assert optimizer.step() is True
        assert model.weight.item() == before - 1.0
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(lambda: 0.0)


def test_an_optimizer_that_breaks_after_the_commit_makes_the_group_heal(lighthouse, steps):
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # noqa: ARG002
            raise ValueError("no memory")

    model = nn.Linear(1, 1)
    with manager(lighthouse, "a") as m:
        optimizer = Optimizer(m, Breaks(model.parameters(), lr=1.0))
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(ValueError, match="no memory"):
            optimizer.step()
        with pytest.raises(KeepstepError, match="no healthy group to heal from"):
            optimizer.zero_grad()
    assert events(steps)[:4] == ["started", "quorum", "committed", "torn"]


@pytest.mark.parametrize("pure", [False, True])
def test_a_backward_pass_is_refused_if_the_begin_of_the_step_has_replaced_the_weights_of_its_forward_pass(
    lighthouse, pure
):
    ready = threading.Barrier(2)

    def group(name: str) -> list[str]:
        model, refused = nn.Linear(3, 1), []
        nn.init.constant_(model.weight, float(ord(name)))
        with manager(lighthouse, name, min_replica_size=2) as m:
            m.set_state_dict_fns(model.load_state_dict, model.state_dict)
            wrapped = PureDistributedDataParallel(m, model) if pure else DistributedDataParallel(m, model)
            optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=0.1))
            ready.wait(30)
            while m.current_step() < 3:
                loss = wrapped(torch.ones(2, 3)).sum()
                optimizer.zero_grad()
                try:
                    loss.backward()
                except RuntimeError as error:
                    refused.append(str(error))
                else:
                    optimizer.step()
            ready.wait(30)
            return [*refused, str(model.weight.tolist())]

    (a,), (b_refused, b) = together(lambda: group("a"), lambda: group("b"))
    assert "call zero_grad() before the forward pass" in b_refused
    assert a == b


def test_a_wrapper_is_not_copied_and_the_error_names_what_to_copy(lighthouse):
    model = nn.Linear(3, 1)
    with manager(lighthouse, "a") as m:
        optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=0.1))
        for wrapper in (DistributedDataParallel(m, model), PureDistributedDataParallel(m, model)):
            with pytest.raises(TypeError, match=r"copy or save the module inside it \(ddp.module"):
                copy.deepcopy(wrapper)
            assert torch.equal(copy.deepcopy(wrapper.module).weight, model.weight)
        with pytest.raises(TypeError, match=r"copy the optimizer inside it \(optimizer.optim"):
            pickle.dumps(optimizer)
