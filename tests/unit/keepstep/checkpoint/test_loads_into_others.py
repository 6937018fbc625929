"""A load that would leave something out is an error; an optimizer gets all that was saved of it."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointError, RelayReader, RelayWriter
from keepstep.state.errors import UnsupportedValue
from tests.support.checkpoints.value_kinds import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def load_through_torch(state, place):
    dcp.load(state, storage_reader=RelayReader(place), no_dist=True)


LOADS = [checkpoint.load, load_through_torch]
FAILURES = (CheckpointError, dcp.api.CheckpointException)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("saved", [2, 3])
def test_a_shorter_list_is_an_error(tmp_path, load, saved):
    checkpoint.save({"layers": [{"w": torch.ones(1)} for _ in range(saved)]}, tmp_path / "c")
    with pytest.raises(FAILURES, match=rf"layers has 1 items here, but {saved} in the checkpoint"):
        load({"layers": [{"w": torch.zeros(1)}]}, tmp_path / "c")


def load_what_fits(state, place):
    checkpoint.load(state, place, strict=False)


def load_what_fits_through_torch(state, place):
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=RelayReader(place), planner=planner, no_dist=True)


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("load", [load_what_fits, load_what_fits_through_torch])
def test_a_load_that_may_be_partial_takes_what_fits(tmp_path, load):
    layers = [torch.ones(1), torch.ones(1)]
    _, optimizer = trained()[:2]
    saved = {"layers": layers, "z": torch.ones(2, dtype=torch.complex64), "optim": optimizer.state_dict()}
    checkpoint.save(saved, tmp_path / "c")
    _, stateless = trained(steps=0)[:2]
    into = {"layers": [torch.zeros(1)], "z": torch.zeros(2), "new": torch.zeros(1)}
    into["optim"] = {
        "state": {0: {"exp_avg": torch.zeros(3, 4)}},
        "param_groups": stateless.state_dict()["param_groups"],
    }
    load(into, tmp_path / "c")
    assert [into["layers"][0].item(), *into["z"].tolist(), into["new"].item()] == [1, 1, 1, 0]
    assert into["optim"]["state"][0]["exp_avg"].equal(saved["optim"]["state"][0]["exp_avg"])


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("has", [[], [0]])
def test_a_state_of_fewer_parameters_is_an_error(tmp_path, load, has):
    _, optimizer, _ = trained()
    checkpoint.save({"optim": optimizer.state_dict()}, tmp_path / "c")
    into = optimizer.state_dict()
    into["state"] = {number: into["state"][number] for number in has}
    absent = "0, 1, 2, 3" if not has else "1, 2, 3"
    empty = r"|optim\.state is empty here"
    with pytest.raises(FAILURES, match=rf"optim has no state of parameters {absent} here, but{empty}"):
        load({"optim": into}, tmp_path / "c")


@pytest.mark.parametrize("load", LOADS)
def test_an_optimizer_of_some_of_the_parameters_loads_their_states(tmp_path, load):
    """As one stage of a pipeline does."""
    names = {name: torch.full((2,), float(at)) for at, name in enumerate(("first.w", "last.w"))}
    groups = [{"lr": 0.1, "params": list(names)}]
    state = {name: {"exp_avg": value} for name, value in names.items()}
    checkpoint.save({"optim": {"state": state, "param_groups": groups}}, tmp_path / "c")
    own = {"state": {"last.w": {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.0, "params": ["last.w"]}]}
    load({"optim": own}, tmp_path / "c")
    assert own["state"]["last.w"]["exp_avg"].tolist() == [1, 1]
    assert own["param_groups"][0]["lr"] == 0.1


def test_a_module_without_memory_is_named(tmp_path):
    checkpoint.save({"model": nn.Linear(2, 2)}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"model\.weight has no memory \(device meta\): allocate the module"):
        checkpoint.load({"model": nn.Linear(2, 2, device="meta")}, tmp_path / "c")


def test_tensors_without_memory_get_it_also_without_a_process_group_which_torch_needs(tmp_path):
    checkpoint.save({"list": [torch.ones(2), {"w": torch.ones(3)}]}, tmp_path / "c")
    into = {"list": [torch.zeros(2, device="meta"), {"w": torch.zeros(3, device="meta")}]}
    checkpoint.load(into, tmp_path / "c")
    assert into["list"][1]["w"].tolist() == [1, 1, 1]
    assert into["list"][0].tolist() == [1, 1]


@pytest.mark.parametrize("load", LOADS)
def test_a_dict_with_an_assignment_of_its_own_sees_each_value(tmp_path, load):
    class Noting(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            seen.append(key)

    seen = []
    into = Noting(plain=torch.zeros(1), inner={"x": 0}, model=nn.Linear(1, 1))
    inner = into["inner"]
    checkpoint.save({"plain": torch.ones(1), "inner": {"x": 3}, "model": nn.Linear(1, 1)}, tmp_path / "c")
    load(into, tmp_path / "c")
    assert set(seen) == {"plain", "inner"}
    assert into["inner"] is inner
    assert inner == {"x": 3}


def test_a_mapping_that_cannot_be_changed_may_have_dicts_in_it(tmp_path):
    checkpoint.save({"a": {"x": 3, "w": torch.ones(2)}}, tmp_path / "c")
    into = {"x": 0, "w": torch.zeros(2)}
    checkpoint.load(MappingProxyType({"a": into}), tmp_path / "c")
    assert not same(into, {"x": 3, "w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="a mapping of the state cannot be changed"):
        checkpoint.load({"a": MappingProxyType(into)}, tmp_path / "c")


def test_a_longer_list_is_an_error_that_names_the_missing_keys(tmp_path):
    checkpoint.save({"layers": [torch.ones(1)]}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"does not have layers\.1"):
        checkpoint.load({"layers": [torch.ones(1), torch.ones(1)]}, tmp_path / "c")


@pytest.mark.parametrize("here", [[], [1, 2, 3]])
@pytest.mark.parametrize("strict", [True, False])
def test_a_list_of_plain_values_in_the_place_of_tensors_is_an_error(tmp_path, here, strict):
    checkpoint.save({"layers": [torch.ones(1)]}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"layers is a list of \d plain values here, but the checkpoint"):
        checkpoint.load({"layers": here}, tmp_path / "c", strict=strict)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("saved", "here"),
    [(torch.complex64, torch.float32), (torch.float32, torch.int64), (torch.int64, torch.bool)],
)
def test_a_conversion_that_drops_parts_of_numbers_is_an_error(tmp_path, load, saved, here):
    checkpoint.save({"w": torch.ones(2, dtype=saved)}, tmp_path / "c")
    target = torch.zeros(2, dtype=here)
    with pytest.raises(FAILURES, match=rf"w is {here} here, but {saved} in the checkpoint"):
        load({"w": target}, tmp_path / "c")
    assert target.sum() == 0


@pytest.mark.parametrize(
    ("saved", "here"), [(torch.float64, torch.bfloat16), (torch.int64, torch.float32), (torch.float32, torch.complex64)]
)
def test_other_conversions_are_made(tmp_path, saved, here):
    checkpoint.save({"w": torch.ones(2, dtype=saved)}, tmp_path / "c")
    state = {"w": torch.zeros(2, dtype=here)}
    checkpoint.load(state, tmp_path / "c")
    assert state["w"].tolist() == [1, 1]


def trained(groups=1, steps=3, schedule=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    parts = [model.parameters()] if groups == 1 else [one.parameters() for one in model]
    optimizer = torch.optim.AdamW([{"params": list(one)} for one in parts], lr=0.1)
    scheduler = None if schedule is None else schedule(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, optimizer, scheduler


def plain(optimizer):
    state = optimizer.state_dict()
    values = {number: {key: one.tolist() for key, one in entry.items()} for number, entry in state["state"].items()}
    return values, state["param_groups"]


def save_through_torch(state, place):
    dcp.save({key: one.state_dict() for key, one in state.items()}, storage_writer=RelayWriter(place), no_dist=True)


@pytest.mark.parametrize("save", [checkpoint.save, save_through_torch])
def test_an_optimizer_without_state_gets_it(tmp_path, save):
    model, optimizer, _ = trained()
    save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    new_model, new, _ = trained(steps=0)
    checkpoint.load({"model": new_model, "optimizer": new}, tmp_path / "c")
    assert plain(new) == plain(optimizer)
    for one, by in ((model, optimizer), (new_model, new)):
        by.zero_grad()
        one(torch.ones(1, 4)).sum().backward()
        by.step()
    assert torch.equal(model[0].weight, new_model[0].weight)


def test_lists_of_tensors_in_the_state_of_an_optimizer_are_loaded_into_one_without_state(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    checkpoint.save({"optimizer": optimizer}, tmp_path / "c")
    new = torch.optim.LBFGS(nn.Linear(4, 4).parameters())
    checkpoint.load({"optimizer": new}, tmp_path / "c")
    saved, loaded = (one.state_dict()["state"][0] for one in (optimizer, new))
    assert [torch.is_tensor(one) for one in loaded["old_dirs"]] == [True] * len(saved["old_dirs"]) != []
    assert str(loaded) == str(saved)


def test_an_optimizer_that_has_stepped_becomes_one_that_was_saved_before(tmp_path):
    _, optimizer, _ = trained(steps=0)
    checkpoint.save({"optimizer": optimizer}, tmp_path / "c")
    _, new, _ = trained(steps=2)
    checkpoint.load({"optimizer": new}, tmp_path / "c")
    assert new.state_dict()["state"] == {}


def test_state_in_float32_of_a_parameter_in_bfloat16_is_loaded_exactly(tmp_path):
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.full((8,), 1 + 2**-20)
    checkpoint.save({"optimizer": optimizer}, tmp_path / "c")
    optimizer.state[parameter]["momentum_buffer"].zero_()
    checkpoint.load({"optimizer": optimizer}, tmp_path / "c")
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full((8,), 1 + 2**-20))


def test_keys_of_a_group_and_states_that_only_the_checkpoint_has_are_taken_over(tmp_path):
    """A script that creates its scheduler after the load is one: ``LRScheduler(last_epoch=3)`` needs ``initial_lr``."""
    _, optimizer, _ = trained(schedule=lambda one: torch.optim.lr_scheduler.StepLR(one, 2))
    checkpoint.save({"optimizer": optimizer}, tmp_path / "c")
    _, new, _ = trained(steps=1)
    new.state.pop(new.param_groups[0]["params"][0])
    checkpoint.load({"optimizer": new}, tmp_path / "c")
    assert plain(new) == plain(optimizer)
    assert new.param_groups[0]["initial_lr"] == 0.1
    torch.optim.lr_scheduler.StepLR(new, 2, last_epoch=3)


def test_a_multistep_schedule_is_saved_and_loaded(tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 50])

    _, optimizer, scheduler = trained(schedule=schedule)
    checkpoint.save({"optimizer": optimizer, "scheduler": scheduler}, tmp_path / "c")
    _, new, new_scheduler = trained(steps=0, schedule=lambda one: torch.optim.lr_scheduler.MultiStepLR(one, [50]))
    checkpoint.load({"optimizer": new, "scheduler": new_scheduler}, tmp_path / "c")
    assert new_scheduler.milestones == scheduler.milestones
    assert type(new_scheduler.milestones) is type(scheduler.milestones)
    assert new_scheduler.last_epoch == 3
    assert new.param_groups[0]["lr"] == pytest.approx(0.01)


def test_torch_loads_a_number_that_is_a_key_into_that_key(tmp_path):
    checkpoint.save({"scheduler": {"milestones": Counter({3: 1})}}, tmp_path / "c")
    state = {"scheduler": {"milestones": Counter({3: 2})}}
    load_through_torch(state, tmp_path / "c")
    assert state == {"scheduler": {"milestones": Counter({3: 1})}}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("steps", [0, 2])
def test_other_numbers_of_parameter_groups_are_an_error(tmp_path, groups, steps):
    _, optimizer, _ = trained(groups=3 - groups)
    checkpoint.save({"optimizer": optimizer}, tmp_path / "c")
    _, new, _ = trained(groups=groups, steps=steps)
    before = plain(new)
    with pytest.raises(CheckpointError, match=rf"optimizer.param_groups has {groups} groups here, but {3 - groups} in"):
        checkpoint.load({"optimizer": new}, tmp_path / "c")
    assert plain(new) == before


def test_another_number_of_parameters_is_an_error(tmp_path):
    _, optimizer, _ = trained()
    checkpoint.save({"optimizer": optimizer}, tmp_path / "c")
    new = torch.optim.AdamW(nn.Linear(4, 3).parameters())
    with pytest.raises(CheckpointError, match=r"param_groups.0 has 2 parameters here, but 4 in the checkpoint"):
        checkpoint.load({"optimizer": new}, tmp_path / "c")


def test_a_model_still_ignores_what_it_does_not_have(tmp_path):
    checkpoint.save({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}, tmp_path / "c")
    model = nn.Sequential(nn.Linear(2, 2))
    checkpoint.load({"model": model}, tmp_path / "c")


def test_a_destination_whose_elements_share_memory_is_refused(tmp_path):
    checkpoint.save({"w": torch.ones(4, 3)}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"elements here that share memory \(strides \(0, 1\)\).*contiguous"):
        checkpoint.load({"w": torch.zeros(3).expand(4, 3)}, tmp_path / "c")


def test_a_mapping_that_cannot_be_changed_is_refused(tmp_path):
    checkpoint.save({"a": {"b": 1}}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"a mapping of the state cannot be changed .*pass a dict instead"):
        checkpoint.load({"a": MappingProxyType({"b": 0})}, tmp_path / "c")


def deep(levels):
    value = torch.ones(1)
    for _ in range(levels):
        value = {"a": value}
    return value


def test_a_state_that_is_too_deep_or_contains_itself_is_refused(tmp_path):
    checkpoint.save({"a": deep(60)}, tmp_path / "c")
    itself: list[object] = [1]
    itself += [itself, itself]
    for state in (deep(70), deep(5000), {"a": itself}, {"a": [torch.ones(1), itself]}):
        with pytest.raises(UnsupportedValue, match=r"nested more than 64 deep|contains itself"):
            checkpoint.save(state, tmp_path / "d")
        with pytest.raises(UnsupportedValue):
            checkpoint.async_save(state, tmp_path / "e").result(60)


def in_low_precision(kind, seed):
    torch.manual_seed(seed)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))
    optimizer = kind([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weight * weight).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.LBFGS, torch.optim.AdamW])
@pytest.mark.parametrize("save", [checkpoint.save, lambda *given: checkpoint.async_save(*given).result(60)])
def test_a_state_that_torch_casts_to_the_dtype_of_its_parameter_comes_back_exact(tmp_path, kind, save):
    optimizer = in_low_precision(kind, 0)
    save({"optimizer": optimizer}, tmp_path / "c")
    new = in_low_precision(kind, 1)
    checkpoint.load({"optimizer": new}, tmp_path / "c")
    assert not same(optimizer.state_dict(), new.state_dict())
