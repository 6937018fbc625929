"""``retry_allreduce``: when a member is lost in a step, the others repeat it with the same gradients."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import Work
from torch.utils.checkpoint import checkpoint

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupDummy, PureDistributedDataParallel
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

    def __init__(
        self,
        manager: Manager,
        *layers: nn.Module,
        quantize: bool = False,
        ddp: type[nn.Module] = DistributedDataParallel,
    ) -> None:
        self.manager = manager
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False), *layers)
        self.weight = self.model[0].get_parameter("weight")
        with torch.no_grad():
            self.weight.fill_(1.0)
        self.ddp = ddp(manager, self.model, should_quantize=quantize)
        self.optimizer = Optimizer(manager, torch.optim.SGD(self.model.parameters(), lr=1.0))

    def backward(self, value: float) -> None:
        self.optimizer.zero_grad()
        self.backward_again(value)

    def backward_again(self, value: float) -> None:
        torch.autograd.backward(self.ddp(torch.full((1, 1), value)).sum())


def lose_one(
    lighthouse: str, *values: float, change: Any = lambda _: None, trainer: Any = Trainer, **options: Any
) -> list[Any]:
    """Let groups with these gradients take a step, from which one more group is gone before it reduces anything.

    Returns:
        Of each group that is left: whether its step committed, its weight, and the number of groups that took part.
    """
    ready = threading.Barrier(len(values) + 1)

    def survivor(number: int) -> tuple[bool, float, int]:
        with manager(lighthouse, f"r{number}", **{**RETRY, **options}) as m:
            one = trainer(m)
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == len(values) + 1
            ready.wait(30)
            one.backward(values[number])
            change(one)
            return one.optimizer.step(), one.weight.item(), m.num_participants()

    def victim() -> None:
        with manager(lighthouse, "victim", **{**RETRY, **options}) as m:
            trainer(m)
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
    (one, other) = lose_one(lighthouse, 2.0, 4.0, trainer=functools.partial(Trainer, quantize=True))
    assert one == other == (True, pytest.approx(-2.0, abs=0.01), 2)


class CheckpointedTrainer(Trainer):
    """Its DDP averages in a callback at the end of the backward pass."""

    def __init__(self, manager: Manager) -> None:
        super().__init__(manager, Checkpointed())


class Checkpointed(nn.Module):
    def forward(self, values: torch.Tensor) -> Any:
        return checkpoint(torch.nn.Identity(), values, use_reentrant=True)


@pytest.mark.parametrize(
    "trainer", [functools.partial(Trainer, ddp=PureDistributedDataParallel), CheckpointedTrainer], ids=["pure", "late"]
)
def test_gradients_that_are_reduced_at_the_end_of_the_backward_pass_are_reduced_again(lighthouse, trainer):
    assert lose_one(lighthouse, 2.0, 4.0, change=replaced, trainer=trainer) == [(True, 0.0, 2)] * 2


def clipped(trainer: Trainer) -> None:
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)


def replaced(trainer: Trainer) -> None:
    assert trainer.weight.grad is not None
    trainer.weight.grad = trainer.weight.grad / 3


def written_through_data(trainer: Trainer) -> None:
    assert trainer.weight.grad is not None
    trainer.weight.grad.data.div_(3)


def written_through_numpy(trainer: Trainer) -> None:
    assert trainer.weight.grad is not None
    gradient = trainer.weight.grad.numpy()
    gradient /= 3


def rate_of_the_norm(trainer: Trainer) -> None:
    assert trainer.weight.grad is not None
    trainer.optimizer.param_groups[0]["lr"] = trainer.weight.grad.norm().item()


USES = [
    (clipped, 0.0),
    (replaced, 0.0),
    (written_through_data, 0.0),
    (written_through_numpy, 0.0),
    (rate_of_the_norm, -8.0),
]
"""Uses of a gradient of 3 by a script, and the weight after the step. It was 1."""


@pytest.mark.parametrize(("use", "weight"), USES)
def test_a_script_may_use_its_gradients_before_the_commit(lighthouse, use, weight):
    """They are the average of the groups that are left, which is 3."""
    one, other = lose_one(lighthouse, 2.0, 4.0, change=use)
    assert one == other == (True, pytest.approx(weight, abs=1e-5), 2)


def test_another_all_reduce_after_the_backward_pass_is_one_of_the_groups_that_are_left(lighthouse):
    losses = []

    def average_loss(trainer: Trainer) -> None:
        loss = torch.tensor(6.0)
        assert trainer.manager.allreduce(loss).wait()
        losses.append(loss.item())

    assert lose_one(lighthouse, 2.0, 4.0, change=average_loss) == [(True, -2.0, 2)] * 2
    assert losses == [6.0] * 2


def test_gradients_that_the_script_reduces_are_reduced_again_when_it_waits(lighthouse):
    """Without a DDP: the loss of the third group shows in the ``wait`` of the first gradient."""
    ready = threading.Barrier(3)

    def group(name: str, value: float) -> tuple[list[bool], list[float], bool] | None:
        with manager(lighthouse, name, **RETRY) as m:
            weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
            Optimizer(m, torch.optim.SGD(weights, lr=1.0))
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == 3
            ready.wait(30)
            if name == "c":
                return None
            works = []
            for weight in weights:
                weight.grad = torch.full((1,), value)
                works.append(m.allreduce(weight.grad))
            waited = [work.wait() for work in works]
            return waited, [weight.grad.item() for weight in weights if weight.grad is not None], m.should_commit()

    results = together(lambda: group("a", 2.0), lambda: group("b", 4.0), lambda: group("c", 0.0))
    assert results[:2] == [([True, True], [3.0, 3.0], True)] * 2


def test_results_that_the_script_has_seen_keep_the_step_from_being_retried(lighthouse, caplog):
    with manager(lighthouse, "a", pg=Lossy(0), **RETRY) as m:
        trainer = Trainer(m)
        trainer.backward(2.0)
        m._context.reconfigurer.pg.failures = 1  # type: ignore[attr-defined]
        trainer.backward_again(2.0)
        assert not trainer.optimizer.step()
        assert trainer.weight.item() == 1.0
    assert "may have used them" in caplog.text


def test_an_all_reduce_of_no_gradient_keeps_the_step_from_being_retried(lighthouse, caplog):
    with manager(lighthouse, "a", pg=Lossy(1), **RETRY) as m:
        m.start_quorum()
        assert not m.allreduce(torch.ones(3)).wait()
        assert not m.should_commit()
    assert "shape (3,) is of no gradient" in caplog.text


def test_a_batch_that_was_drawn_by_the_number_of_the_group_keeps_the_step_from_being_retried(lighthouse, caplog):
    """Among fewer groups the numbers are others: with a retry, a batch is trained on twice, and another one never."""
    with manager(lighthouse, "a", pg=Lossy(1), **RETRY) as m:
        trainer = Trainer(m)
        m.start_quorum()
        assert m.participating_rank() == 0
        trainer.backward(2.0)
        assert not trainer.optimizer.step()
        assert trainer.weight.item() == 1.0
    assert "drawn its batch by it" in caplog.text


def test_an_error_of_the_group_itself_discards_the_step(lighthouse, caplog):
    with manager(lighthouse, "a", pg=Lossy(1), **RETRY) as m:
        trainer = Trainer(m)
        m.start_quorum()
        m.wait_quorum()
        works = [m.allreduce(torch.ones(1))]
        m.report_error(RuntimeError("bad batch"))
        assert not works[0].wait()
        assert not trainer.optimizer.step()
    assert "this group failed by itself" in caplog.text


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
    """Rank 1 may have drawn its first batch by its number, so rank 0 does not reduce its own gradients again."""
    place = place_to_meet()

    def rank(number: int) -> list[bool]:
        with manager(lighthouse, "g", rank=number, pg=Lossy(1), **place, **RETRY) as m:
            trainer = Trainer(m)
            trainer.optimizer.zero_grad()
            if number == 1:
                assert m.participating_rank() == 0
            trainer.backward_again(2.0)
            first = trainer.optimizer.step()
            m._context.reconfigurer.pg.failures = 1  # type: ignore[attr-defined]
            trainer.backward(2.0)
            return [first, trainer.optimizer.step()]

    assert together(lambda: rank(0), lambda: rank(1)) == [[False, True]] * 2


class ReducedWithTheLost(ProcessGroupDummy):
    """Its first reduction succeeds, because the group that is lost took part in it. The average is 7."""

    first = True

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        if self.first:
            self.first = False
            for tensor in tensors:
                tensor.fill_(7.0)
        return super().allreduce(tensors, opts, timeout)


@pytest.mark.parametrize(("use", "weight"), USES)
def test_a_rank_whose_reductions_succeeded_repeats_them_with_the_others_before_the_script_sees_a_result(
    lighthouse, use, weight
):
    place, of_ranks = place_to_meet(), [Lossy(1), ReducedWithTheLost()]

    def rank(number: int) -> tuple[bool, float]:
        with manager(lighthouse, "g", rank=number, pg=of_ranks[number], **place, **RETRY) as m:
            trainer = Trainer(m)
            trainer.backward(3.0)
            use(trainer)
            return trainer.optimizer.step(), trainer.weight.item()

    assert together(lambda: rank(0), lambda: rank(1)) == [(True, pytest.approx(weight, abs=1e-5))] * 2


def test_groups_of_two_ranks_use_gradients_without_the_part_of_a_rank_whose_group_is_lost(lighthouse):
    """Rank 1 of the lost group may take part in the first reductions of the ranks 1; its rank 0 takes part in none."""
    places = {name: place_to_meet() for name in ("a", "b", "lost")}
    ready, leaving = threading.Barrier(6), threading.Barrier(2)

    def rank(group: str, number: int, value: float) -> tuple[bool, float]:
        with manager(lighthouse, group, rank=number, **places[group], **RETRY) as m:
            trainer = Trainer(m)
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == 3
            ready.wait(30)
            if (group, number) == ("lost", 0):
                m.report_error(RuntimeError("bad batch"))
                committed = m.should_commit()
            else:
                trainer.backward(value)
                rate_of_the_norm(trainer)
                committed = trainer.optimizer.step()
            if group == "lost":
                leaving.wait(60)
            return committed, trainer.weight.item()

    values = {("a", 0): 2.0, ("a", 1): 1.0, ("b", 0): 4.0, ("b", 1): 3.0, ("lost", 0): 0.0, ("lost", 1): 50.0}
    results = together(*(lambda who=who, value=value: rank(*who, value) for who, value in values.items()))
    assert results[:4] == [(True, -8.0), (True, -3.0)] * 2
    assert not any(committed for committed, _ in results[4:])


def votes_no(trainer: Trainer) -> bool:
    trainer.manager.report_error(RuntimeError("bad batch"))
    return trainer.optimizer.step()


def begins_another(trainer: Trainer) -> bool:
    """As a script that catches its error of the forward pass."""
    with pytest.raises(RuntimeError):
        trainer.ddp(torch.ones(1, 2))
    trainer.manager.report_error(RuntimeError("bad batch"))
    trainer.optimizer.zero_grad()
    return False


@pytest.mark.parametrize("ends", [votes_no, begins_another])
def test_no_rank_waits_at_the_end_of_its_backward_pass_for_a_rank_that_has_left_the_step(lighthouse, ends):
    place, pgs = place_to_meet(), [ProcessGroupDummy(), ProcessGroupDummy()]

    def rank(number: int) -> list[bool]:
        with manager(lighthouse, "g", rank=number, pg=pgs[number], **place, **RETRY) as m:
            trainer = Trainer(m)
            trainer.optimizer.zero_grad()
            if number == 1:
                results = [ends(trainer)]
            else:
                trainer.backward_again(2.0)
                results = [trainer.optimizer.step()]
            for _ in range(2):
                trainer.backward(2.0)
                results.append(trainer.optimizer.step())
            return results

    assert together(lambda: rank(0), lambda: rank(1)) == [[False, True, True]] * 2


@pytest.mark.parametrize("failures", [0, 1])
def test_a_rank_that_reduces_more_than_the_others_does_not_wait_for_them_and_a_loss_discards_its_step(
    lighthouse, failures, caplog
):
    place, pgs, leaving = place_to_meet(), [Lossy(0), Lossy(0)], threading.Barrier(2)

    def rank(number: int) -> tuple[bool, float]:
        with manager(lighthouse, "g", rank=number, pg=pgs[number], **place, **RETRY) as m:
            trainer = Trainer(m)
            trainer.backward(2.0)
            if number == 0:
                pgs[0].failures = failures
                assert m.allreduce(torch.ones(1)).wait() is (failures == 0)
            committed = trainer.optimizer.step()
            leaving.wait(60)  # a rank that votes no knows the decision before the other one votes
            return committed, trainer.weight.item()

    committed = not failures
    assert together(lambda: rank(0), lambda: rank(1)) == [(committed, -1.0 if committed else 1.0)] * 2
    assert ("may have used them" in caplog.text) is not committed


def test_a_group_of_several_ranks_does_not_repeat_an_all_reduce_that_its_script_has_waited_for(lighthouse, caplog):
    """Without a backward pass the ranks do not agree, as only one of them may wait."""
    place, of_ranks, leaving = place_to_meet(), [Lossy(1), ReducedWithTheLost()], threading.Barrier(2)

    def rank(number: int) -> tuple[bool, bool, float]:
        with manager(lighthouse, "g", rank=number, pg=of_ranks[number], **place, **RETRY) as m:
            trainer = Trainer(m)
            m.start_quorum()
            trainer.weight.grad = torch.full((1, 1), 2.0)
            waited = m.allreduce(trainer.weight.grad).wait()
            committed = trainer.optimizer.step()
            leaving.wait(60)  # as above
            return waited, committed, trainer.weight.item()

    assert together(lambda: rank(0), lambda: rank(1)) == [(False, False, 1.0), (True, False, 1.0)]
    assert "may have used them" in caplog.text


def test_a_gradient_that_was_changed_while_it_was_reduced_keeps_the_step_from_being_retried(lighthouse, caplog):
    with manager(lighthouse, "a", pg=Lossy(1), **RETRY) as m:
        trainer = Trainer(m)
        m.start_quorum()
        trainer.weight.grad = torch.full((1, 1), 2.0)
        m.allreduce(trainer.weight.grad)  # and the script does not wait for it
        clipped(trainer)
        assert not trainer.optimizer.step()
    assert "a gradient was changed after its all-reduce" in caplog.text


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
