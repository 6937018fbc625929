"""``retry_allreduce``: when a member is lost in a step, the others repeat it with the same gradients."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import Work

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupDummy
from keepstep.data import ElasticSampler
from keepstep.local_sgd import LocalSGD
from keepstep.process_group import ProcessGroupError
from keepstep.process_group.works import PendingWork
from keepstep.runtime.exits import MismatchExit
from keepstep.step.retrying.retry_rules import MAX_RETRIES
from tests.services.manager.groups import events, manager, place_to_meet, together

RETRY: dict[str, Any] = {"init_sync": False, "retry_allreduce": True}


class Trainer:
    """A model of one weight; the gradient of a batch is its value."""

    def __init__(self, manager: Manager, *layers: nn.Module, quantize: bool = False) -> None:
        self.manager = manager
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False), *layers)
        self.weight = self.model[0].get_parameter("weight")
        with torch.no_grad():
            self.weight.fill_(1.0)
        self.ddp = DistributedDataParallel(manager, self.model, should_quantize=quantize)
        self.optimizer = Optimizer(manager, torch.optim.SGD(self.model.parameters(), lr=1.0))

    def backward(self, value: float) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.ddp(torch.full((1, 1), value)).sum())


def lose_one(
    lighthouse: str, *values: float, change: Any = lambda _: None, quantize: bool = False, **options: Any
) -> list[Any]:
    """Let groups with these gradients take a step, from which one more group is gone before it reduces anything.

    Returns:
        Of each group that is left: whether its step committed, its weight, and the number of groups that took part.
    """
    ready = threading.Barrier(len(values) + 1)

    def survivor(number: int) -> tuple[bool, float, int]:
        with manager(lighthouse, f"r{number}", **{**RETRY, **options}) as m:
            trainer = Trainer(m, quantize=quantize)
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == len(values) + 1
            ready.wait(30)
            trainer.backward(values[number])
            change(trainer)
            return trainer.optimizer.step(), trainer.weight.item(), m.num_participants()

    def victim() -> None:
        with manager(lighthouse, "victim", **{**RETRY, **options}) as m:
            Trainer(m, quantize=quantize)
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == len(values) + 1
            ready.wait(30)
            # leaves in the middle of the step, without a word

    return together(*(lambda number=number: survivor(number) for number in range(len(values))), victim)[:-1]


@pytest.mark.parametrize("synchronous", [False, True], ids=["async", "sync"])
def test_the_step_of_a_lost_member_is_that_of_the_others_alone(lighthouse, synchronous):
    assert lose_one(lighthouse, 2.0, 4.0, use_async_quorum=not synchronous) == [(True, -2.0, 2)] * 2


def test_quantized_gradients_are_reduced_again(lighthouse):
    (one, other) = lose_one(lighthouse, 2.0, 4.0, quantize=True)
    assert one == other == (True, pytest.approx(-2.0, abs=0.01), 2)


def test_gradients_that_were_clipped_before_the_commit_are_not_reduced_again(lighthouse, caplog):
    def clip(trainer: Trainer) -> None:
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)

    assert lose_one(lighthouse, 2.0, change=clip) == [(False, 1.0, 2)]
    assert "register_step_pre_hook" in caplog.text


def test_an_all_reduce_of_no_gradient_keeps_the_step_from_being_retried(lighthouse, caplog):
    def log_loss(trainer: Trainer) -> None:
        trainer.manager.allreduce(torch.ones(3)).wait()

    assert lose_one(lighthouse, 2.0, change=log_loss) == [(False, 1.0, 2)]
    assert "shape (3,) is of no gradient" in caplog.text


def test_an_error_of_the_group_itself_discards_the_step(lighthouse):
    def fail(trainer: Trainer) -> None:
        trainer.manager.report_error(RuntimeError("bad batch"))

    assert lose_one(lighthouse, 2.0, change=fail) == [(False, 1.0, 2)]


def test_buffers_are_those_of_the_groups_that_are_left(lighthouse):
    """The first group is lost, from which buffers are copied, and the average has another divisor."""
    ready = threading.Barrier(3)

    def group(name: str, value: float) -> list[float] | None:
        with manager(lighthouse, name, **RETRY) as m:
            norm = nn.BatchNorm1d(1)
            trainer = Trainer(m, norm)
            norm.register_buffer("count", torch.tensor(value))  # after it was wrapped: of no group but this
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == 3
            ready.wait(30)
            if name == "a":
                return None
            trainer.optimizer.zero_grad()
            torch.autograd.backward(trainer.ddp(torch.tensor([[value], [value]])).sum())
            assert trainer.optimizer.step()
            assert norm.running_mean is not None
            assert norm.num_batches_tracked is not None
            return [norm.running_mean.item(), norm.num_batches_tracked.item()]

    means = together(lambda: group("a", 1.0), lambda: group("b", 2.0), lambda: group("c", 4.0))
    assert means[1:] == [[pytest.approx(0.3), 1]] * 2


class Lossy(ProcessGroupDummy):
    """Loses a member in each of its first reductions, and leaves something else in the tensors."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        if not self.failures:
            return super().allreduce(tensors, opts, timeout)
        self.failures -= 1
        for tensor in tensors:
            tensor.fill_(7.0)
        lost = PendingWork(tensors)
        lost._end(ProcessGroupError("a member is lost"))
        return lost


@pytest.mark.parametrize("failures", [MAX_RETRIES, MAX_RETRIES + 1])
def test_a_step_is_retried_a_few_times_and_then_discarded(lighthouse, failures, monkeypatch, tmp_path):
    monkeypatch.setenv("KEEPSTEP_STEP_LOG", str(tmp_path / "steps.jsonl"))
    with manager(lighthouse, "a", pg=Lossy(failures), **RETRY) as m:
        trainer = Trainer(m)
        trainer.backward(2.0)
        commits = failures <= MAX_RETRIES
        assert trainer.optimizer.step() is commits
        assert trainer.weight.item() == (-1.0 if commits else 1.0)
        trainer.backward(2.0)
        assert trainer.optimizer.step()
    steps = [event for event in events(tmp_path / "steps.jsonl") if event in ("retried", "discarded", "committed")]
    assert steps == ["retried"] * MAX_RETRIES + ["committed" if commits else "discarded", "committed"]


def test_all_ranks_of_a_group_retry_or_none_does(lighthouse):
    """Rank 1 clips its first gradient, so rank 0 does not reduce its own again."""
    place = place_to_meet()

    def rank(number: int) -> list[bool]:
        with manager(lighthouse, "g", rank=number, pg=Lossy(1), **place, **RETRY) as m:
            trainer = Trainer(m)
            trainer.backward(2.0)
            if number == 1:
                nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            first = trainer.optimizer.step()
            m._context.reconfigurer.pg.failures = 1  # type: ignore[attr-defined]
            trainer.backward(2.0)
            return [first, trainer.optimizer.step()]

    assert together(lambda: rank(0), lambda: rank(1)) == [[False, True]] * 2


def test_what_takes_more_than_a_batch_is_refused_with_retries(lighthouse):
    with manager(lighthouse, "a", **RETRY) as m:
        model = nn.Linear(1, 1)
        with pytest.raises(ValueError, match="LocalSGD cannot retry a step"):
            LocalSGD(m, model, torch.optim.SGD(model.parameters(), lr=1.0), sync_every=2)
        with pytest.raises(ValueError, match="ElasticSampler cannot retry a step"):
            ElasticSampler(8, m, 4)


def test_a_group_with_another_setting_is_refused_by_name(lighthouse):
    with manager(lighthouse, "a", **RETRY) as one, manager(lighthouse, "b", init_sync=False) as other:
        one.start_quorum()
        with pytest.raises(
            MismatchExit, match=r"setting retry_allreduce: (True in a, unknown in b|unknown in b, True in a)"
        ):
            together(lambda: (one.should_commit(), one.start_quorum()), other.start_quorum)
