"""Checkpoints of tensors that wrap others: every way to save stores what ``save`` stores, or refuses by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointError, RelayReader, RelayWriter, StoredCheckpoint
from keepstep.checkpoint.loading import open_reader
from keepstep.checkpointing import UnsupportedValue
from keepstep.state.flattening import flatten
from keepstep.state.local_parts import local_parts
from keepstep.state.staged_parts import StagedParts, StagingBuffers
from tests.support.models.wrapped_tensor import RegisteredTensor, ScaledTensor, parts, scaled

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save_in_background(state, place):
    saving = checkpoint.async_save(state, place)
    for value in state.values():
        if isinstance(value, RegisteredTensor):
            value.codes.zero_()
    saving.result(30)


def save_through_torch(state, place):
    dcp.save(state, storage_writer=RelayWriter(place), no_dist=True)


@pytest.mark.parametrize("save", [checkpoint.save, save_in_background, save_through_torch])
def test_each_wrapper_is_loaded_with_its_own_numbers(tmp_path, save):
    save({"exp_avg": scaled(1), "exp_avg_sq": scaled(2), "list": [scaled(3), torch.ones(2)]}, tmp_path / "c")
    here = scaled(5)
    loaded = {"exp_avg": here, "exp_avg_sq": None, "list": [scaled(6), torch.zeros(2)]}
    checkpoint.load(loaded, tmp_path / "c")
    assert loaded["exp_avg"] is here
    for number, value in enumerate((here, loaded["exp_avg_sq"], loaded["list"][0]), 1):
        assert parts(value) == parts(scaled(number))


def test_torch_loads_a_wrapper_through_a_relay_reader(tmp_path):
    checkpoint.save({"a": scaled(1), "b": torch.ones(3)}, tmp_path / "c")
    state = {"a": scaled(2), "b": torch.zeros(3)}
    here = state["a"]
    dcp.load(state, storage_reader=RelayReader(tmp_path / "c"), no_dist=True)
    assert state["a"] is here
    assert parts(here) == parts(scaled(1))
    assert state["b"].sum() == 3


def test_a_copy_in_the_background_does_not_change_and_stays_tied():
    value = scaled(1)
    staged = StagedParts(local_parts(flatten({"a": value, "tuple": (value,), "w": torch.ones(8)})), StagingBuffers())
    value.codes.zero_()
    copy = staged.parts["a"].value
    assert copy.inner["codes"].tolist() == scaled(1).codes.tolist()
    assert staged.parts["tuple"].value[0].inner["codes"].data_ptr() == copy.inner["codes"].data_ptr()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(4, 8), r"a is a tensor of torch.float32 here, but a .*RegisteredTensor of shape \(4, 8\)"),
        (lambda: scaled(1, ScaledTensor), r"a is a .*ScaledTensor of shape \(4, 8\) here, but a .*RegisteredTensor"),
        (lambda: scaled(1, shape=(2, 8)), r"a is a .*RegisteredTensor of shape \(2, 8\) here"),
    ],
)
def test_a_wrapper_that_does_not_fit_its_destination_is_an_error(tmp_path, make, words):
    checkpoint.save({"a": scaled(1)}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load({"a": make()}, tmp_path / "c")


def test_a_plain_tensor_is_not_loaded_into_a_wrapper(tmp_path):
    checkpoint.save({"a": torch.ones(4, 8)}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"a is a .*RegisteredTensor here, but a float32 tensor"):
        checkpoint.load({"a": scaled(1)}, tmp_path / "c")


def test_a_class_that_this_process_does_not_know_is_named(tmp_path):
    checkpoint.save({"a": scaled(1, ScaledTensor)}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"a is a .*ScaledTensor, which this process does not know"):
        checkpoint.load({"a": None}, tmp_path / "c")
    reader = open_reader(tmp_path / "c")
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        StoredCheckpoint(reader).state_dict()
    reader.close()


class Named(torch.Tensor):
    """Has memory of its own, and perhaps more."""


@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save, save_through_torch])
def test_every_way_to_save_refuses_a_subclass_without_parts(tmp_path, save):
    with pytest.raises((UnsupportedValue, dcp.api.CheckpointException), match="which cannot be stored here"):
        save({"a": torch.ones(3).as_subclass(Named)}, tmp_path / "c")


@pytest.mark.parametrize("save", [checkpoint.save, save_in_background])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_tensor_is_saved(tmp_path, save):
    value = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.quint8)
    save({"q": value}, tmp_path / "c")
    loaded = {"q": torch.quantize_per_tensor(torch.zeros(3, 4), 1.0, 0, torch.quint8)}
    checkpoint.load(loaded, tmp_path / "c")
    assert torch.equal(loaded["q"].dequantize(), value.dequantize())


def states_of(kind, optim):
    """Return two states with random numbers."""
    random = torch.Generator().manual_seed(0)
    classes = {"8bit": optim.subclass_8bit.OptimState8bit, "4bit": optim.subclass_4bit.OptimState4bit}
    signed = {} if kind == "fp8" else {"signed": True}
    cls = classes.get(kind, optim.subclass_fp8.OptimStateFp8)
    found = []
    for _ in range(2):
        value = cls.zeros((64, 128), dtype=torch.bfloat16, **signed)
        bits = torch.randint(0, 100, value.codes.shape, generator=random, dtype=torch.uint8)
        value.codes.view(torch.uint8).copy_(bits)
        value.scale.copy_(torch.rand(value.scale.shape, generator=random))
        found.append(value)
    return found


@pytest.mark.parametrize("kind", ["8bit", "4bit", "fp8"])
@pytest.mark.parametrize("save", [checkpoint.save, lambda *given: checkpoint.async_save(*given).result(30)])
@pytest.mark.filterwarnings("ignore")
def test_states_of_torchao_are_saved_and_loaded_into_a_new_optimizer(tmp_path, kind, save):
    """Imports torchao. Its step would compile: the states are filled without one."""
    optim = pytest.importorskip("torchao.optim")
    create = {"8bit": optim.AdamW8bit, "4bit": optim.AdamW4bit, "fp8": optim.AdamWFp8}[kind]

    def build():
        model = nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)
        return model, create(model.parameters(), lr=0.1)

    model, optimizer = build()
    first, second = states_of(kind, optim)
    optimizer.state[model.weight] = {"step": torch.tensor(3.0), "exp_avg": first, "exp_avg_sq": second}
    save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    new_model, new = build()
    checkpoint.load({"model": new_model, "optimizer": new}, tmp_path / "c")
    loaded = new.state[new_model.weight]
    for name, value in (("exp_avg", first), ("exp_avg_sq", second)):
        assert loaded[name].dtype is torch.bfloat16
        assert torch.equal(loaded[name].dequantize(), value.dequantize())
        assert torch.equal(loaded[name].codes.view(torch.uint8), value.codes.view(torch.uint8))
    assert loaded["step"] == 3
