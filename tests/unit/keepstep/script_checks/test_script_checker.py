"""A mistake that trains different models without an error is named once, with a remedy; a correct script is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.script_checks.mistakes import in_commit, in_ranks
from keepstep.script_checks.script_checker import OPTIMIZERS_CHECKED_AT, ScriptChecker
from keepstep.step.live_state import LiveState


class Script:
    """A checker, with the state that ``save`` returns, and its warnings."""

    def __init__(self, save: Callable[[], Any] | None = None, rank: int = 0, ranks: int = 1) -> None:
        self.warnings: dict[str, str] = {}
        state = LiveState(dict, lambda _: None)
        if save is not None:
            state.register("default", lambda _: None, save)
        self.checker = ScriptChecker(state, self, rank, ranks)  # type: ignore[arg-type]

    def warning(self, name: str, *, reason: str, remedy: str) -> None:
        assert name not in self.warnings, "warned twice"
        assert remedy
        self.warnings[name] = reason

    def debug(self, _: str, **facts: Any) -> None:
        self.warnings["debug"] = str(facts)

    def trains(self, model: nn.Module | None, *optimized: nn.Module) -> dict[str, str]:
        """Wrap ``model``, build an optimizer for each of ``optimized``, commit two steps; return the warnings."""
        if model is not None:
            self.checker.add_module(model)
        for one in optimized:
            self.checker.add_optimizer(torch.optim.SGD(one.parameters(), lr=0.1))
        for step in (1, 2):
            self.step(step)
        return self.warnings

    def step(self, number: int, begins: float = 0.0, ends: float = 0.0) -> None:
        """Commit the step ``number``; times in seconds."""
        self.checker.quorum_requested(begins)
        self.checker.committed(number, ends, groups=2, collectives=1, synchronized=False)


def of(model: nn.Module) -> Callable[[], Any]:
    return lambda: {"epoch": 3, "all": [model.state_dict()]}


def test_a_correct_script_causes_no_warning() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Flatten())
    assert Script(of(model)).trains(model, model) == {}
    assert Script(of(model)).trains(None, model) == {}, "it averages its gradients itself"


def test_a_state_of_copies_is_recognized_by_its_values() -> None:
    model = nn.Linear(300, 4)
    assert Script(lambda: {k: v.clone() for k, v in model.state_dict().items()}).trains(model, model) == {}


def test_a_script_without_a_state_is_warned_at_its_first_quorum() -> None:
    script = Script()
    script.checker.quorum_requested(0.0)
    assert "cannot receive the weights of the others" in script.warnings["no state registered"]


def test_a_wrapped_module_that_is_not_in_the_state_is_named() -> None:
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    assert Script(of(other)).trains(model, model) == {
        "model not in the registered state": "2 of 2 parameters (weight, bias) of the DistributedDataParallel module "
        "do not heal"
    }


def test_an_optimizer_of_other_parameters_is_named() -> None:
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    both = nn.ModuleList([model, other])
    of_other = "2 of 2 parameters (shape (4, 3), shape (4,)) of the optimizer are "
    wrapped = Script(of(both)).trains(model, other)
    assert wrapped["optimizer of other parameters"].startswith(of_other + "in no DistributedDataParallel module")
    unwrapped = Script(of(model)).trains(None, other)
    assert unwrapped["optimizer of other parameters"].startswith(of_other + "not in the registered state")


def trained_with(optimizer: torch.optim.Optimizer, save: Callable[[], Any], skipped: int = 0) -> dict[str, str]:
    """Commit steps, as many as are checked; the optimizer skips the first ones, as with a GradScaler."""
    script = Script(save)
    script.checker.add_optimizer(optimizer)
    for number in range(1, OPTIMIZERS_CHECKED_AT[-1] + 1):
        script.step(number)
        if number > skipped:
            for group in optimizer.param_groups:
                for one in group["params"]:
                    one.grad = torch.ones_like(one)
            optimizer.step()
    return script.warnings


@pytest.mark.parametrize("skipped", [0, 3])
def test_an_optimizer_that_is_not_in_the_state_is_named(skipped: int) -> None:
    model = nn.Linear(3, 4)
    adam = torch.optim.Adam(model.parameters())
    assert trained_with(adam, of(model), skipped) == {
        "optimizer not in the registered state": "6 of 6 tensors in the state of Adam do not heal, so a group that "
        "heals changes its weights in another way than the others"
    }


def test_an_optimizer_that_is_in_the_state_or_has_none_causes_no_warning() -> None:
    model = nn.Linear(3, 4)
    adam = torch.optim.Adam(model.parameters())
    assert trained_with(adam, lambda: [model.state_dict(), adam.state_dict()]) == {}
    assert trained_with(adam, lambda: copy.deepcopy([model.state_dict(), adam.state_dict()])) == {}
    assert trained_with(torch.optim.SGD(model.parameters(), 0.1), of(model)) == {}


def test_frozen_parameters_may_be_left_out_of_the_optimizer_and_of_the_state() -> None:
    model, head = nn.Linear(3, 4), nn.Linear(4, 1)
    model.requires_grad_(requires_grad=False)
    assert Script(of(head)).trains(nn.Sequential(model, head), head) == {}


def test_frozen_parameters_of_the_optimizer_that_train_later_cause_no_warning() -> None:
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 1))
    assert Script(of(model)).trains(model, model) == {}


def test_a_state_that_cannot_be_read_yet_does_not_end_the_script() -> None:
    def broken() -> Any:
        raise NameError("epoch")

    model = nn.Linear(3, 4)
    assert list(Script(broken).trains(model, model)) == ["debug"]


@pytest.mark.parametrize(
    ("groups", "collectives", "synchronized", "warned"),
    [(2, 0, False, True), (1, 0, False, False), (2, 1, False, False), (2, 0, True, False)],
)
def test_only_a_step_of_several_groups_without_an_all_reduce_is_a_mistake(
    groups: int, collectives: int, synchronized: bool, warned: bool
) -> None:
    assert (in_commit(groups=groups, collectives=collectives, synchronized=synchronized) is not None) == warned


def test_several_ranks_that_each_hold_the_whole_model_are_a_mistake() -> None:
    script = Script(of(nn.Linear(1, 1)), ranks=8)
    script.checker.add_module(nn.Linear(1, 1))
    assert "the 8 ranks of this group each hold all parameters" in script.warnings["every rank trains a whole model"]
    other = Script(of(nn.Linear(1, 1)), rank=3, ranks=8)
    other.checker.add_module(nn.Linear(1, 1))
    assert other.warnings == {}, "rank 0 warns for the group"
    assert in_ranks(ranks=8, sharded=True) is None
    assert in_ranks(ranks=1, sharded=False) is None


def test_groups_that_leave_each_other_behind_by_design_cause_no_warning() -> None:
    script = Script(of(nn.Linear(1, 1)))
    for number, begins in ((2, 0.0), (7, 85.0)):
        script.checker.quorum_requested(begins)
        script.checker.committed(number, begins + 1.0, groups=2, collectives=2, synchronized=True)
    assert "other groups went on without this one" not in script.warnings


@pytest.mark.parametrize(
    ("begins", "number", "warned"),
    [(85.0, 7, True), (85.0, 3, False), (11.0, 7, False)],
    ids=["left behind", "the others waited", "left behind at once"],
)
def test_a_long_evaluation_after_which_the_others_are_ahead_is_a_mistake(
    begins: float, number: int, warned: bool
) -> None:
    script = Script(of(nn.Linear(1, 1)))
    script.step(2, begins=0.0, ends=10.0)
    script.checker.quorum_requested(begins)
    script.step(number, begins=begins + 3.0, ends=begins + 4.0)  # the first attempt did not commit
    assert ("other groups went on without this one" in script.warnings) == warned
    if warned:
        reason = script.warnings["other groups went on without this one"]
        assert reason == "this group spent 75 s between two steps, and the others committed 4 steps without it"


def test_a_schedule_that_goes_on_after_a_discarded_step_is_a_mistake() -> None:
    model = nn.Linear(3, 4)
    script = Script(of(model))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    script.checker.add_optimizer(sgd)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    sgd.step()  # else torch warns of the schedule
    script.step(1)
    scheduler.step()
    script.checker.quorum_requested(0.0)
    script.checker.discarded()
    script.step(2)
    assert script.warnings == {}, "nothing changed between the step that was discarded and the next one"
    for _ in range(2):  # warned once
        script.checker.quorum_requested(0.0)
        script.checker.discarded()
        scheduler.step()
        script.checker.quorum_requested(0.0)
    assert list(script.warnings) == ["optimizer changed after a discarded step"]
    assert "SGD param group 0 lr from 0.25 to 0.125" in script.warnings["optimizer changed after a discarded step"]


def test_a_sync_batch_norm_that_normalizes_over_one_group_is_a_mistake() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    script = Script(of(model))
    script.checker.add_module(model)
    assert script.warnings["SyncBatchNorm without a process group"].startswith("1 SyncBatchNorm modules normalize over")


def test_an_embedding_that_shrinks_its_rows_in_the_forward_pass_is_a_mistake() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Embedding(3, 4, max_norm=1.0))
    script = Script(of(model))
    script.checker.add_module(model[0])
    assert script.warnings == {}
    script.checker.add_module(model)
    assert script.warnings["embedding with max_norm"].startswith("the forward pass of 1 shrinks")
