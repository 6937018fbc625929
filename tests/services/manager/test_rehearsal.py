"""A script rehearses a step before its first quorum. Nothing of it is left, and no other group notices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, ElasticSampler, Manager, Optimizer
from keepstep.ddp import PureDistributedDataParallel
from keepstep.local_sgd import LocalSGD
from tests.services.manager.groups import events, manager

STEPS = 3


class Net(nn.Module):
    """Has averaged buffers, copied ones, and a dropout that draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.register_buffer("limits", torch.arange(4.0).expand(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Group:
    def __init__(self, m: Manager, wrap: type = DistributedDataParallel, **options: Any) -> None:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)  # noqa: NPY002  scripts use it
        self.m, self.model = m, Net()
        self.average = torch.zeros(2)
        """Of the outputs: a tensor that only the registered state has."""
        self.ddp = wrap(m, self.model)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.optimizer = Optimizer(m, self.inner, **options)
        m.set_state_dict_fns(lambda _: None, self.state)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.inner.state_dict(), "average": self.average}

    def step(self) -> bool:
        self.optimizer.zero_grad()
        shift = random.random() + np.random.rand()  # noqa: NPY002
        output = self.ddp(torch.randn(4, 6) + shift)
        self.average += output.detach().mean(0)
        output.square().sum().backward()
        self.m.record(loss=1.0)
        return self.optimizer.step()

    def bits(self) -> list[Any]:
        """All that training changes; None for a gradient that is not there."""
        moments = [one for each in self.inner.state.values() for one in each.values()]
        tensors = [*self.model.state_dict().values(), self.average, *moments, torch.get_rng_state()]
        gradients = [None if one.grad is None else one.grad.tolist() for one in self.model.parameters()]
        numbers = np.random.get_state()[1].tolist()  # noqa: NPY002
        return [
            [one.tolist() for one in tensors],
            gradients,
            self.inner.param_groups[0]["lr"],
            random.getstate(),
            numbers,
        ]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_rehearsed_step_is_undone_and_training_is_as_without_it(lighthouse, steps, wrap):
    with manager(lighthouse, "a") as m:
        own = Group(m, wrap)
        before = own.bits()
        with m.rehearse():
            assert own.step() is False
            assert (m.participating_rank(), m.num_participants(), m.errored()) == (0, 1, None)
            value = torch.tensor([5.0])
            assert m.allreduce(value).wait()
            assert value.item() == 5, "the average of one group"
            assert own.bits() != before
            assert own.inner.state, "the inner optimizer has taken a step too"
        assert own.bits() == before
        assert m.current_step() == 0
        assert events(steps) == ["started"], "no quorum, and nothing committed or discarded"
        assert [own.step() for _ in range(STEPS)] == [True] * STEPS
        rehearsed = own.bits()
    with manager(lighthouse, "a") as m:
        own = Group(m, wrap)
        assert [own.step() for _ in range(STEPS)] == [True] * STEPS
        assert own.bits() == rehearsed


def test_an_error_in_a_rehearsal_is_raised_after_everything_is_restored(lighthouse):
    with manager(lighthouse, "a") as m:
        own = Group(m, catch_up=True)
        for parameter in own.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        own.inner.state[own.model.body[0].weight]["step"] = torch.tensor(7.0)
        before = own.bits()

        def fails() -> None:
            own.optimizer.zero_grad(set_to_none=False)
            own.ddp(torch.randn(4, 6)).sum().backward()
            own.inner.state.clear()
            own.inner.param_groups[0]["lr"] = 3.0
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), m.rehearse():
            fails()
        assert own.bits() == before
        own.inner.state.clear()
        assert own.step(), "an ordinary first step"


def test_a_rehearsal_does_not_move_the_position_in_the_data(lighthouse):
    with manager(lighthouse, "a") as m:
        own = Group(m)
        sampler = ElasticSampler(40, m, global_batch_size=8)
        with m.rehearse():
            rehearsed = next(iter(sampler))
            own.step()
        assert (sampler.epoch, sampler.sample) == (0, 0)
        assert next(iter(sampler)) == rehearsed, "the first batch of the job"
        own.step()
        assert sampler.sample == 8


def test_a_rehearsal_with_a_grad_scaler_steps_the_inner_optimizer_too(lighthouse):
    with manager(lighthouse, "a") as m:
        group, scaler, steps = Group(m), torch.amp.GradScaler("cpu"), []
        group.inner.register_step_post_hook(lambda *_: steps.append(1))
        with m.rehearse():
            group.optimizer.zero_grad()
            scaler.scale(group.ddp(torch.randn(4, 6)).square().sum()).backward()
            scaler.step(group.optimizer)
            scaler.update()
        assert steps == [1]
        assert scaler.get_scale() == 65536.0


def test_what_a_rehearsal_cannot_undo_is_refused(lighthouse):
    with manager(lighthouse, "a") as m:
        own = Group(m)
        local = LocalSGD(m, own.model, own.inner, sync_every=2)
        with m.rehearse():
            for call in (m.finish, m.resume, m.background.request, lambda: m.load_state_dict({})):
                with pytest.raises(RuntimeError, match="in rehearse\\(\\), which undoes"):
                    call()
            with pytest.raises(RuntimeError, match="LocalSGD in rehearse"):
                local.__enter__()
            with pytest.raises(RuntimeError, match="belongs before the first step"), m.rehearse():
                pass
        m.start_quorum()
        with pytest.raises(RuntimeError, match="belongs before the first step"), m.rehearse():
            pass
