"""Values in files of torch.save: which are read without a call of the file, and which cannot be written."""

from __future__ import annotations

import io
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import save
from keepstep.checkpoint.interchange import (
    CannotHold,
    ForeignCheckpointError,
    Format,
    RefusedClass,
    export_checkpoint,
)
from keepstep.state.errors import UnsupportedValue
from keepstep_formats.pickled_items import is_surely_plain, load_pickled, write_pickled
from tests.support.models.wrapped_tensor import scaled

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Called:
    """Pickled as a call of a type with an argument."""

    def __init__(self, kind: Any, argument: Any) -> None:
        self.call = kind, (argument,)

    def __reduce__(self) -> Any:
        return self.call


TENSORS = (torch.ones(2), torch.empty(0, 3), torch.ones(9)[2:4], torch.ones(2, dtype=torch.complex64).conj())
SCALARS = st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats(allow_nan=False) | st.complex_numbers()
KEYS = SCALARS | st.text(st.characters()) | st.tuples(st.integers(), st.text())
LEAVES = KEYS | st.binary() | st.sampled_from(TENSORS) | st.binary().map(io.BytesIO)
VALUES = st.recursive(
    LEAVES,
    lambda one: st.lists(one) | st.tuples(one, one) | st.dictionaries(KEYS, one) | st.sets(KEYS) | st.frozensets(KEYS),
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(VALUES)
def test_a_value_that_is_surely_plain_is_read(value: Any) -> None:
    file = io.BytesIO()
    write_pickled(value, file, "a")
    if is_surely_plain(value):
        assert type(load_pickled(file.getvalue(), "a")) is type(value)


def test_values_that_only_a_load_can_tell_are_not_surely_plain() -> None:
    shared, deep = [1], [1]
    for _ in range(99):
        deep = [deep]
    looped: list[Any] = []
    looped.append(looped)
    views = torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2).to(torch.float8_e4m3fn)
    for value in (frozenset({1}), b"x", 1 << 64, np.ones(1), Path("x"), [shared, shared], deep, looped, *views):
        assert not is_surely_plain({"a": value})
    assert is_surely_plain({"a": [(), (), {1}, {(1, "x"): io.BytesIO(b"x")}], "b": torch.nn.Parameter(torch.ones(1))})


@pytest.mark.parametrize("kind", [list, dict, int, tuple])
def test_a_file_may_name_the_factory_of_a_defaultdict_but_not_call_it(tmp_path: Path, kind: type) -> None:
    torch.save({"a": defaultdict(kind, {"b": np.arange(3), "t": torch.ones(1)})}, tmp_path / "a.pt")
    loaded = load_pickled(tmp_path / "a.pt", "a.pt")["a"]
    assert type(loaded) is defaultdict
    assert loaded.default_factory is kind
    assert loaded["b"].tolist() == [0, 1, 2]
    torch.save({"a": Called(kind, ())}, tmp_path / "b.pt")
    with pytest.raises(ForeignCheckpointError, match="cannot be read"):
        load_pickled(tmp_path / "b.pt", "b.pt")


def test_a_factory_that_is_not_known_is_refused(tmp_path: Path) -> None:
    torch.save({"a": defaultdict(str, {"b": "c"})}, tmp_path / "a.pt")
    with pytest.raises(RefusedClass, match=r"builtins\.str"):
        load_pickled(tmp_path / "a.pt", "a.pt")
    torch.save({"a": defaultdict(torch.Size, {"b": 1})}, tmp_path / "b.pt")
    with pytest.raises(ForeignCheckpointError, match=r"b\.pt.*default_factory is <class 'torch\.Size'>"):
        load_pickled(tmp_path / "b.pt", "b.pt")


@pytest.mark.parametrize("form", [Format.TORCH, Format.DCP])
def test_a_value_that_a_format_does_not_hold_is_named_or_left_out(tmp_path: Path, form: Format) -> None:
    values = {"format": torch.channels_last, "int4": torch.arange(4, dtype=torch.uint8).view(torch.int4)}
    if form is Format.DCP:
        values |= {"wrapper": scaled(1), "bits": torch.arange(4, dtype=torch.uint8).view(torch.bits8)}
    for name, value in values.items():
        save({"w": torch.ones(1), name: value}, tmp_path / name)
        with pytest.raises(CannotHold, match=rf"{name}\b") as error:
            export_checkpoint(tmp_path / name, tmp_path / f"{name} out", form=form)
        assert isinstance(error.value, UnsupportedValue), "one class for all that is refused"
    save({"w": torch.ones(1), **values}, tmp_path / "all")
    done = export_checkpoint(tmp_path / "all", tmp_path / "all out", form=form, skip_objects=True)
    assert (set(done.left_out), done.tensors) == (set(values), 1)


def test_an_exported_time_keeps_its_fold(tmp_path: Path) -> None:
    when = datetime(2026, 1, 2, fold=1)  # noqa: DTZ001
    save({"when": when}, tmp_path / "c")
    export_checkpoint(tmp_path / "c", tmp_path / "c.pt")
    assert repr(torch.load(tmp_path / "c.pt", weights_only=False)["when"]) == repr(when)
