"""Tensors that wrap others, such as quantized optimizer states, travel as what they wrap."""

from __future__ import annotations

import pytest
import torch

from keepstep.checkpointing import UnsupportedValue
from keepstep.lifecycle.rehearsal.state_before import StateBefore
from keepstep.script_checks.state_coverage import StateCoverage
from keepstep.state.errors import StateMismatch
from keepstep.state.state_bytes import load_state, save_state
from keepstep.state.values.tensors_in_containers import tensors_in
from tests.support.models.wrapped_tensor import ScaledTensor, parts, scaled


def round_trip(state, into=None):
    manifest, pack = save_state(state)
    return load_state(manifest, bytes(pack), into)


def test_a_wrapper_comes_back_with_its_class_context_and_inner_tensors():
    state = {"a": scaled(1), "b": scaled(2, dtype=torch.float32), "list": [scaled(3)]}
    loaded = round_trip(state)
    assert parts(loaded["a"]) == parts(state["a"])
    assert parts(loaded["b"]) == parts(state["b"])
    assert parts(loaded["list"][0]) == parts(state["list"][0])
    assert loaded["a"].dtype is torch.bfloat16


def test_a_wrapper_is_received_into_the_tensors_of_the_one_at_its_place():
    source, here = scaled(1), scaled(2)
    codes = here.codes
    assert round_trip({"a": source}, {"a": here})["a"] is here
    assert here.codes is codes
    assert parts(here) == parts(source)


def test_a_wrapper_of_another_shape_or_context_is_built_anew():
    here = {"shape": scaled(2, shape=(2, 2)), "dtype": scaled(3, dtype=torch.float32), "plain": torch.zeros(4, 8)}
    source = {key: scaled(1) for key in here}
    loaded = round_trip(source, dict(here))
    for key, value in source.items():
        assert parts(loaded[key]) == parts(value)
        assert loaded[key] is not here[key]


def test_a_plain_tensor_is_not_received_into_a_wrapper():
    source = torch.ones(4, 8, dtype=torch.bfloat16)
    loaded = round_trip({"a": source}, {"a": scaled(1)})["a"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, source)


def test_wrappers_that_share_a_tensor_store_it_once_and_are_tied_again():
    one = scaled(1)
    other = ScaledTensor(one.codes, torch.tensor(2.0), torch.float32)
    _, pack = save_state({"one": one, "other": other})
    assert len(pack) < 3 * 64 + one.codes.nbytes
    loaded = round_trip({"one": one, "other": other}, {"other": scaled(2, ScaledTensor)})
    assert loaded["one"].codes.data_ptr() == loaded["other"].codes.data_ptr()


def test_a_class_that_is_not_registered_is_loaded_where_the_receiver_has_one_of_it():
    source = scaled(1, ScaledTensor)
    with pytest.raises(StateMismatch, match=r"state\['a'\] is a .*ScaledTensor, which.*add_safe_globals"):
        round_trip({"a": source})
    assert parts(round_trip({"a": source}, {"a": scaled(2, ScaledTensor)})["a"]) == parts(source)


def test_a_wrapper_of_wrappers_is_stored_too():
    source = scaled(1)
    outer = type(source)(source, torch.tensor(0.5), torch.float32)
    loaded = round_trip({"a": outer})["a"]
    assert parts(loaded.codes) == parts(source)
    assert loaded.scale == 0.5
    assert [one.dtype for one in tensors_in({"a": outer})] == [torch.int8, torch.float32, torch.float32]


class Named(torch.Tensor):
    """Has memory of its own, and perhaps more."""


class Opaque(torch.Tensor):
    """A wrapper that does not say what it wraps."""

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0]


@pytest.mark.parametrize("make", [lambda: torch.ones(3).as_subclass(Named), lambda: Opaque(torch.ones(3))])
def test_a_subclass_without_parts_is_named(make):
    with pytest.raises(UnsupportedValue, match=r"state\['a'\] is a .*(Named|Opaque), which cannot be stored"):
        save_state({"a": make()})


def test_a_rehearsal_puts_the_tensors_in_a_wrapper_back():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.state[weight] = {"exp_avg": scaled(1)}
    before = StateBefore([optimizer], {"registered": scaled(2)})
    optimizer.state[weight]["exp_avg"].codes.zero_()
    before.restore()
    assert parts(optimizer.state[weight]["exp_avg"]) == parts(scaled(1))


def test_a_state_covers_the_wrapper_that_it_has_and_no_other():
    here = scaled(1)
    coverage = StateCoverage({"w": here})
    assert coverage.has(here)
    assert not coverage.has(scaled(2))
