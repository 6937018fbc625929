"""The values of optimizers that groups compare in each step."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn

from keepstep.group.agreement import REMEMBERED_STEPS, StepValues, values_difference
from keepstep.script_checks.common_values import CommonValues, plain


def common(model: nn.Module, *optimizers: torch.optim.Optimizer) -> CommonValues:
    values = CommonValues()
    values.add_module(model)
    for optimizer in optimizers:
        values.add_optimizer(optimizer)
    return values


def digest(values: CommonValues) -> str:
    return StepValues().add(1, 1, values.of_step())


def test_a_state_that_was_loaded_has_the_digest_of_the_optimizer_that_it_came_from():
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    ours, theirs = (
        torch.optim.AdamW(model.parameters(), lr=rate) for model, rate in zip(models, (1, 0.5), strict=True)
    )
    assert digest(common(models[0], ours)) != digest(common(models[1], theirs))
    torch.optim.lr_scheduler.StepLR(ours, 10)  # adds initial_lr
    theirs.load_state_dict(ours.state_dict())
    assert digest(common(models[0], ours)) == digest(common(models[1], theirs))


@pytest.mark.parametrize("change", [{"lr": 0.2}, {"betas": (0.9, 0.95)}, {"foreach": True}, {"own": "other"}])
def test_every_value_of_a_param_group_counts(change):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "own": "one"}], lr=0.1)
    values = common(model, optimizer)
    before = digest(values)
    assert digest(values) == before
    optimizer.param_groups[0].update(change)
    assert digest(values) != before


def test_a_value_that_changes_in_place_counts():
    model, rate = nn.Linear(3, 2), torch.tensor(0.1)
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "own": [1, 2]}], lr=rate, foreach=False)
    values = common(model, optimizer)
    seen = [digest(values)]
    rate.fill_(0.2)
    seen.append(digest(values))
    optimizer.param_groups[0]["own"].append(3)
    seen.append(digest(values))
    del optimizer.param_groups[0]["own"]
    optimizer.param_groups[0]["other"] = 1
    seen.append(digest(values))
    assert len(set(seen)) == len(seen)


def test_values_that_do_not_change_are_the_same_object():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    values, steps = common(model, optimizer), StepValues()
    first = values.of_step()
    assert values.of_step() is first
    before = steps.add(1, 1, first)
    assert steps.add(1, 2, values.of_step()) == before
    optimizer.param_groups[0]["lr"] = 0.2
    assert steps.add(1, 3, values.of_step()) != before
    optimizer.param_groups[0]["lr"] = 0.1
    assert steps.add(1, 4, values.of_step()) == before


def test_numbers_of_other_types_are_equal_and_objects_do_not_count():
    assert plain(1) == plain(1.0) == plain(torch.tensor(1)) == plain(torch.tensor([1.0], dtype=torch.float64)) == 1.0
    assert plain([0.5, torch.tensor(2.0)]) == (0.5, 2.0)
    assert plain(object()) is plain(torch.zeros(2)) is plain((1, object()))


def test_parameters_that_are_added_later_count_in_their_order():
    digests = []
    for order in (1, -1):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        values = common(model, optimizer)
        first = digest(values)
        optimizer.add_param_group({"params": [one.weight for one in model[1:]][::order]})
        assert digest(values) != first
        digests.append(digest(values))
    assert digests[0] != digests[1]


def test_the_order_of_parameters_and_the_arithmetic_are_known_when_something_was_added():
    model = nn.Linear(2, 1)
    values = CommonValues()
    assert values.take_new() is None
    values.add_module(model)
    lines, arithmetic = values.take_new() or ([], {})
    assert not lines
    assert arithmetic["OMP_NUM_THREADS"] == str(torch.get_num_threads())
    values.add_optimizer(torch.optim.SGD([model.bias, model.weight]))
    assert values.take_new() == ([], arithmetic), "the optimizer is gone"
    optimizer = torch.optim.SGD([model.bias, model.weight])
    values.add_optimizer(optimizer)
    assert values.take_new() == ([["SGD param group 0: bias", "SGD param group 0: weight"]], arithmetic)
    assert values.take_new() is None


def test_a_module_that_comes_later_changes_no_name_of_the_first_one():
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(first.parameters())
    early = common(first, optimizer)
    known = digest(early)
    late = CommonValues()
    late.add_module(first)
    for values in (early, late):
        values.add_module(second)
    late.add_optimizer(optimizer)
    assert digest(early) == digest(late) == known


def test_an_outer_optimizer_computes_no_sum_that_depends_on_the_threads():
    model, values = nn.Linear(2, 1), CommonValues()
    outer = torch.optim.SGD(model.parameters())
    values.add_optimizer(outer, dict(model.named_parameters()))
    lines, arithmetic = values.take_new() or ([], {})
    assert lines == [["SGD param group 0: weight", "SGD param group 0: bias"]]
    assert "ATEN_CPU_CAPABILITY" in arithmetic
    assert "OMP_NUM_THREADS" not in arithmetic


def test_the_newest_difference_of_the_steps_that_both_groups_remember_is_named():
    ours, theirs = StepValues(), StepValues()
    for step in range(REMEMBERED_STEPS + 3):
        ours.add(7, step, (("SGD param group 0", "lr\t0.1\nmomentum\t0.9"),))
        theirs.add(7, step, (("SGD param group 0", f"lr\t{0.1 if step < 9 else step}\nmomentum\t0.9"),))
    assert len(ours.lines()) == REMEMBERED_STEPS
    newest = REMEMBERED_STEPS + 2
    assert values_difference(ours.lines(), theirs.lines(), "r1") == f"SGD param group 0 lr: 0.1 here, {newest} in r1"
    assert values_difference(ours.lines(), ours.lines(), "r1") == ""
    assert values_difference(ours.lines(), {"7/9": "no values"}, "r1") == ""
    assert "only: unknown here, 1 in r1" in values_difference({"7/9": {}}, {"7/9": {"only": 1}}, "r1")


def test_values_are_read_while_a_step_is_added() -> None:
    """A garbage collection may run Python in the midst of a copy of the steps, and let the training thread run."""
    values, steps = StepValues(), itertools.count()

    def add(phase: str, _info: object) -> None:
        values.add(1, next(steps), (("", f"{phase}\t1"),))

    add("first", None)
    threshold = gc.get_threshold()
    gc.callbacks.append(add)
    gc.set_threshold(1)
    try:
        for _ in range(200):
            values.lines()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(add)
    assert next(steps) > 10
