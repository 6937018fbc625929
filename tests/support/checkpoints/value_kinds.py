"""Every kind of value that people put into a state, and an exact comparison of two of them."""

from __future__ import annotations

import copy
import io
import math
import random
import re
import struct
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import torch

from tests.support.models.wrapped_tensor import RegisteredTensor, ScaledTensor, parts, scaled

DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
"""All of this torch: one that a later torch adds is a row of the table too."""


class Phase(Enum):
    WARM = "warm"


class Level(IntEnum):
    HIGH = 3


class Name(StrEnum):
    ADAM = "adam"


class Options(Flag):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: int
    where: Any


@dataclass
class Settings:
    rate: float = 0.1
    more: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    rate: float = 0.1


class Bag(dict[Any, Any]):
    """A dict with attributes."""


class Items(list[Any]):
    """A list with attributes."""


class Steps(int):
    pass


class Tagged(torch.Tensor):
    """A tensor with attributes and memory of its own."""


CLASSES: list[Any] = [Phase, Level, Name, Options, Point, Settings, Frozen, Bag, Items, Steps, Tagged]
"""A script registers them with ``torch.serialization.add_safe_globals``."""


def bag() -> Bag:
    one = Bag(rate=0.1)
    one.origin = "file"  # type: ignore[attr-defined]
    return one


def tagged() -> torch.Tensor:
    one = torch.arange(3.0).as_subclass(Tagged)
    one.tag = "x"  # type: ignore[attr-defined]
    return one


def with_attribute() -> torch.Tensor:
    one = torch.nn.Parameter(torch.arange(3.0))
    one.tensor_model_parallel = True  # type: ignore[attr-defined]
    return one


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor with any bits of ``dtype``."""
    shape = shape or (8,)
    raw = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.int64) * 37 % (2 if dtype is torch.bool else 251)
    raw = raw.to(torch.uint8)
    return raw.view(dtype).view(shape) if math.prod(shape) else torch.empty(shape, dtype=torch.uint8).view(dtype)


def quantized(scheme: str) -> torch.Tensor:
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    if scheme == "tensor":
        return torch.quantize_per_tensor(values, 0.1, 3, torch.quint8)
    scales = torch.tensor([0.1, 0.2, 0.3])
    if scheme == "channel":
        return torch.quantize_per_channel(values, scales, torch.tensor([0, 1, 2]), 0, torch.qint8)
    return torch.quantize_per_channel(values, scales, torch.tensor([0.5, 1.0, 2.0]), 0, torch.quint8)


def nan_payloads() -> torch.Tensor:
    return torch.tensor([0x7FC00001, 0x7F800001, -1, -0x7FFFFFFF - 1], dtype=torch.int32).view(torch.float32)


def optimizer_state(kind: type[torch.optim.Optimizer], dtype: torch.dtype = torch.bfloat16, **how: Any) -> Any:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4, 4, dtype=dtype))
    optimizer = kind([parameter], **{"lr": 0.1, **how})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter * parameter).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]
    return optimizer.state_dict()


def cycle() -> Any:
    one: list[Any] = [1]
    one.append(one)
    return one


def dict_cycle() -> Any:
    one: dict[str, Any] = {"a": torch.ones(1)}
    one["self"] = one
    return one


def shared() -> Any:
    one = torch.arange(4.0)
    return {"a": one, "b": one, "part": one[1:3]}


def shared_list() -> Any:
    one = [1, 2]
    return {"a": one, "b": one}


def overlapping() -> Any:
    storage = torch.arange(10.0)
    return {"a": storage[:6], "b": storage[3:], "t": storage[:6].view(2, 3).T}


def module_state() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()


Make = Callable[[], Any]


def kinds(**made: Make) -> dict[str, Make]:
    return made


def each(*values: Any) -> dict[str, Make]:
    """Return a kind for each value that does not change."""
    return {repr(value): constant(value) for value in values}


def constant(value: Any) -> Make:
    return lambda: value


def complex_tensor() -> torch.Tensor:
    return torch.tensor([1 + 2j, 3 - 4j])


def with_text_keys(state: Any) -> Any:
    """Return a state with text in place of the keys of its dicts. Two keys of one text become one."""
    if isinstance(state, dict):
        made: dict[str, Any] = {}
        for key, value in state.items():
            text, new = str(key), with_text_keys(value)
            made[text] = made[text] | new if isinstance(new, dict) and isinstance(made.get(text), dict) else new
        return made
    return [with_text_keys(value) for value in state] if isinstance(state, list) else state


def beside(base: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"a": base, "b": view(base)}


def beside_imag() -> dict[str, torch.Tensor]:
    base = complex_tensor()
    return {"c": base.imag, "d": base.conj().imag}


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(3.0)


def deep(levels: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(levels):
        value = [value]
    return value


def array(code: str) -> Any:
    return np.frombuffer(bytes(range(1, 1 + 4 * np.dtype(code).itemsize)), np.uint8).view(code).copy()


def of_dtypes(*dtypes: torch.dtype) -> dict[str, Make]:
    return {str(dtype): partial(of_dtype, dtype) for dtype in dtypes}


BITS = [one for one in DTYPES if str(one).startswith("torch.bits")]
SMALL = [one for one in DTYPES if re.fullmatch(r"torch\.u?int[1-7]", str(one))]
QUANTIZED = [one for one in DTYPES if str(one).startswith(("torch.qint", "torch.quint"))]
NOT_IN_SAFETENSORS = [torch.complex32, torch.complex128]
COMMON = [one for one in DTYPES if one not in {*BITS, *SMALL, *QUANTIZED, *NOT_IN_SAFETENSORS}]
MATRIX = torch.tensor([[0.0, 2.0], [3.0, 0.0]])

DENSE: dict[str, dict[str, Make]] = {
    "dense tensors, parameters, buffers": {
        **of_dtypes(*COMMON),
        **kinds(
            scalar=lambda: torch.tensor(2.5),
            empty=lambda: torch.empty(0, 3),
            nan_payloads=nan_payloads,
            negative_zero=lambda: torch.tensor([0.0, -0.0]),
            view_of_a_big_storage=lambda: torch.arange(1 << 18, dtype=torch.float32)[5:9],
            parameter=lambda: torch.nn.Parameter(torch.arange(3.0)),
            frozen_parameter=lambda: torch.nn.Parameter(torch.arange(3.0), requires_grad=False),
            parameter_with_attribute=with_attribute,
            buffer=lambda: torch.nn.Buffer(torch.arange(3.0)),
            random_state=lambda: torch.Generator().manual_seed(1).get_state(),
            requires_grad=lambda: torch.arange(3.0, requires_grad=True),
            with_a_graph=lambda: torch.arange(3.0, requires_grad=True) * 2,
            inference=inference,
        ),
    },
    "views: strided, expanded, conjugated": kinds(
        strided=lambda: torch.arange(24.0).view(4, 6)[::2, 1::2],
        transposed=lambda: torch.arange(6.0).view(2, 3).T,
        channels_last=lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        expanded=lambda: torch.arange(3.0).expand(4, 3),
        conjugate=lambda: complex_tensor().conj(),
        negative=lambda: complex_tensor().conj().imag,
        real=lambda: complex_tensor().real,
    ),
    "complex32, complex128": of_dtypes(*NOT_IN_SAFETENSORS),
    "bits8, bits16, bits1x8, bits2x4, bits4x2": of_dtypes(*BITS),
    "int1 to int7, uint1 to uint7": of_dtypes(*SMALL),
}
"""Kinds that may be the data of a ``ShardedTensor``, by row of the table in docs/values.md."""

OTHERS: dict[str, dict[str, Make]] = {
    "tensors that wrap others, as torchao's": kinds(
        wrapper=partial(scaled, 1),
        of_a_view=lambda: RegisteredTensor(
            torch.arange(64, dtype=torch.int8)[8:40].view(4, 8), torch.ones(()), torch.bfloat16
        ),
    ),
    "quantized tensors": kinds(per_tensor=partial(quantized, "tensor"), per_channel=partial(quantized, "channel")),
    "quantized tensors with float zero points, or without a scale": {
        "float": partial(quantized, "float"),
        **of_dtypes(*QUANTIZED),
    },
    "nested and sparse tensors": kinds(
        nested=lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        jagged=lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        coo=MATRIX.to_sparse,
        uncoalesced=lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,)),
        csr=MATRIX.to_sparse_csr,
        csc=MATRIX.to_sparse_csc,
        bsr=lambda: MATRIX.to_sparse_bsr((1, 1)),
        bsc=lambda: MATRIX.to_sparse_bsc((1, 1)),
    ),
    "other subclasses of tensors": kinds(tagged=tagged),
    "tensors on `meta`": kinds(meta=lambda: torch.empty(3, device="meta")),
    "several views of one storage": kinds(
        conjugate=lambda: beside(complex_tensor(), torch.Tensor.conj),
        negative=beside_imag,
        shared=shared,
        overlapping=overlapping,
        in_lists=lambda: {"a": [torch.ones(1)], "b": {"0": torch.ones(1)}},
        deep=lambda: deep(60),
    ),
    "views of one storage with two dtypes": kinds(
        dtypes=lambda: beside(torch.arange(4.0), lambda one: one.view(torch.int32)),
        imag=lambda: beside(complex_tensor(), lambda one: one.conj().imag),
    ),
    "lists, tuples, sets, dicts, dotted keys": {
        **kinds(
            tuple=lambda: (1, torch.ones(2), ("a",)),
            list_of_tensors=lambda: [1, torch.ones(2), [torch.zeros(1)], None],
            shared_list=shared_list,
            dotted_keys=lambda: {"a.b": torch.ones(1), "c..d": 1, "": 2},
            empty=lambda: {"a": {}, "b": [], "c": {"d": {}}, "t": torch.ones(1)},
        ),
        **each((), [1, "a", None], [], {1, "a", (2, 3)}, set(), frozenset({1, "a"})),
    },
    "keys: int, float, bool, None, tuple, bytes, enum": kinds(
        int=lambda: {0: torch.ones(1), 1: 2},
        float=lambda: {0.5: 1, math.inf: torch.ones(1)},
        bool=lambda: {True: 1, False: torch.ones(1)},
        none=lambda: {None: 1, "b": torch.ones(1)},
        tuple=lambda: {(0, "a"): torch.ones(1), (1, (2,)): 2},
        bytes=lambda: {b"a": torch.ones(1), b"b": 1},
        enum=lambda: {Phase.WARM: torch.ones(1), Level.HIGH: 1},
    ),
    "keys that are equal as text or with dots": kinds(
        text=lambda: {1: torch.ones(1), "1": torch.zeros(1)},
        values=lambda: {1: "x", "1": "y"},
        dots=lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
    ),
    "Counter, OrderedDict, defaultdict": kinds(
        counter=lambda: Counter({"b": 2, "a": 1}),
        ordered=lambda: OrderedDict([("b", 1), ("a", torch.ones(1))]),
        module=lambda: module_state() | {"step": 1},
        default=lambda: defaultdict(list, {"loss": [1.5, torch.ones(2)]}),
    ),
    "subclasses of dict, with attributes": kinds(dict=bag),
    "subclasses of list": kinds(list=lambda: Items([1, torch.ones(2)])),
    "numbers, text, bytes, None": {
        **each(
            None, True, -3, 1 << 200, -(1 << 63) - 1, 0.1, -math.inf, -0.0, complex(-0.0, 1.0), "\u00e9\0\U0001f600"
        ),
        **each(b"\0\xff"),
        **kinds(
            nan_payload=lambda: struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0],
            long_bytes=lambda: bytes(range(256)) * 100,
            bytearray=lambda: bytearray(b"abc"),
            bytesio=lambda: io.BytesIO(b"abc"),
        ),
    },
    "numpy arrays and scalars of numbers, text, times": {
        **{
            f"array {code}": partial(array, code)
            for code in ("i1", "u2", "<i4", ">i4", "u8", "f2", "f4", "f8", "c8", "c16")
        },
        **{f"array {code}": partial(array, code) for code in ("S3", "M8[ns]", "m8[s]")},
        **kinds(
            bool=lambda: np.array([True, False]),
            text=lambda: np.array(["abc", "\u00e9"]),
            long=lambda: np.arange(3, dtype=np.longdouble),
            fortran=lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
            scalar_array=lambda: np.array(1.5),
            empty=lambda: np.empty((0, 3)),
            strided=lambda: np.arange(10)[::3],
        ),
        **each(np.float32(1.5), np.float64(1.5), np.float16(-0.0), np.int64(3), np.bool_(True), np.complex64(1j)),
        **each(
            np.str_("\u00e9"), np.bytes_(b"a"), np.datetime64("2026-01-01"), np.timedelta64(3, "s"), np.longdouble(1.5)
        ),
    },
    "states of the generators of Python and numpy": kinds(
        python=lambda: random.Random(1).getstate(),
        numpy_legacy=lambda: np.random.RandomState(1).get_state(),
        numpy=lambda: np.random.default_rng(1).bit_generator.state,
    ),
    "enums, named tuples, dataclasses": {
        **each(Phase.WARM, Level.HIGH, Name.ADAM, Options.ONE | Options.TWO, Steps(7), Frozen()),
        **kinds(point=lambda: Point(1, torch.ones(2)), settings=lambda: Settings(0.5, [1])),
    },
    "dates, times, paths": {
        **each(datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, tzinfo=UTC)),  # noqa: DTZ001
        **each(datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2)))),
        **each(datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2), "X")), date(2026, 1, 2), time(1, 2)),
        **each(timedelta(days=-1, microseconds=3), Path("/data/run 1"), PurePosixPath("a/b")),
    },
    "times with fold=1": each(datetime(2026, 1, 2, fold=1), time(1, 2, fold=1)),  # noqa: DTZ001
    "torch.dtype, device, Size, layout, version": each(
        *(torch.bfloat16, torch.qint8, SMALL[-1], torch.device("cuda", 1), torch.Size([2, 3]), torch.sparse_csr),
        *(torch.per_channel_affine, torch.__version__),
    ),
    "torch.memory_format": each(torch.channels_last),
    "deque": kinds(deque=lambda: deque([1, torch.arange(3)], maxlen=5)),
    "states of torch's optimizers": kinds(
        nadam=partial(optimizer_state, torch.optim.NAdam),
        asgd=partial(optimizer_state, torch.optim.ASGD),
        amsgrad=partial(optimizer_state, torch.optim.AdamW, amsgrad=True),
        capturable=partial(optimizer_state, torch.optim.Adam, lr=torch.tensor(0.1)),
        adafactor=partial(optimizer_state, torch.optim.Adafactor),
    ),
    "states of LBFGS": kinds(lbfgs=partial(optimizer_state, torch.optim.LBFGS, torch.float32)),
    "Namespace, time zones, numpy.dtype, classes, text that is not UTF-8": {
        **each(Namespace(lr=0.1), UTC, np.dtype("f4"), Settings),
        **kinds(surrogate=lambda: "a\ud800b"),
    },
    "numpy arrays with fields or objects": kinds(
        structured=lambda: np.zeros(2, [("a", "i4"), ("b", "f8")]),
        objects=lambda: np.array([None, "a"], object),
        masked=lambda: np.ma.array([1, 2], mask=[False, True]),
        matrix=lambda: np.asmatrix(np.eye(2)),
        records=lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        void=lambda: np.void(b"abcd"),
        record=lambda: np.zeros(1, [("a", "i4")])[0],
    ),
    "random generators and other objects": {
        **each(SimpleNamespace(a=1), range(3), slice(1, 2), Decimal("1.10"), Fraction(1, 3), uuid.UUID(int=5), ...),
        **each(np.float32, len, torch.finfo(torch.float32)),
        **kinds(
            generator=lambda: torch.Generator().manual_seed(1),
            numpy_generator=lambda: np.random.default_rng(1),
            python_generator=lambda: random.Random(1),
            zone=lambda: datetime(2026, 1, 2, tzinfo=ZoneInfo("Europe/Berlin")),
            stringio=lambda: io.StringIO("abc"),
            memoryview=lambda: memoryview(b"abc"),
            object=object,
            function=lambda: lambda: 1,
            partial=lambda: partial(cycle),
            iterator=lambda: iter([1]),
            exception=lambda: ValueError("x"),
            torch_tuple=lambda: torch.ones(2, 2).max(0),
            default_of_a_lambda=lambda: (defaultdict(lambda: 1, {"a": 2}),),
        ),
    },
    "values that contain themselves": kinds(list=cycle, dict=dict_cycle),
}
"""Other kinds, by row."""

ROWS = DENSE | OTHERS


def blank(value: Any) -> Any:
    """Return a destination for ``value``: of the same structure and classes, with other content."""
    if isinstance(value, dict):
        empty = copy.copy(value)
        for key, item in value.items():
            dict.__setitem__(empty, key, blank(item))
        return empty
    if isinstance(value, list) and any(isinstance(one, (torch.Tensor, dict, list)) for one in value):
        filled = copy.copy(value)
        filled[:] = [blank(one) for one in value]
        return filled
    if type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and value.layout is torch.strided:
        special = value.is_nested or value.dtype in QUANTIZED
        return None if special else torch.zeros(value.shape, dtype=value.dtype)
    return None


def plain(value: Any) -> Any:
    """Return ``value`` with plain dicts and lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def same(one: Any, other: Any) -> str:
    """Return where two values differ; empty: nowhere.

    Neither memory layout, the order of a plain dict, nor gradients are compared.
    """
    if isinstance(one, torch.Tensor):
        return _tensor(one, other)
    if type(one) is not type(other):
        return f"{type(one).__name__} became {type(other).__name__}"
    if isinstance(one, (dict, list)) and getattr(one, "__dict__", None) and vars(one) != vars(other):
        return "attributes"
    if isinstance(one, dict):
        return _dict(one, other)
    if isinstance(one, (list, tuple, deque)):
        if len(one) != len(other) or (isinstance(one, deque) and one.maxlen != other.maxlen):
            return f"length {len(one)} became {len(other)}"
        return next((f"[{n}]{at}" for n, (a, b) in enumerate(zip(one, other, strict=True)) if (at := same(a, b))), "")
    if isinstance(one, (np.ndarray, np.generic)):
        alike = one.dtype.newbyteorder("=") == other.dtype.newbyteorder("=") and one.shape == other.shape
        return "" if alike and _numbers(one) == _numbers(other) else f" {one!r:.50} became {other!r:.50}"
    if isinstance(one, (float, complex)):
        bits = [struct.pack("<2d", value.real, value.imag) for value in (complex(one), complex(other))]
        return "" if bits[0] == bits[1] else " has other bits"
    if isinstance(one, io.BytesIO):
        return "" if (one.getvalue(), one.tell()) == (other.getvalue(), other.tell()) else " has other bytes"
    if isinstance(one, (datetime, time)):
        return "" if repr(one) == repr(other) else f" {one!r} became {other!r}"
    return "" if one == other else f" {one!r:.50} became {other!r:.50}"


def _dict(one: Any, other: Any) -> str:
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return " has another default_factory"
    ordered = isinstance(one, OrderedDict)
    keys = [[(type(key), key) for key in (each if ordered else sorted(each, key=repr))] for each in (one, other)]
    if keys[0] != keys[1]:
        return f" keys {list(one)[:5]} became {list(other)[:5]}"
    return next((f"[{key!r}]{at}" for key in one if (at := same(one[key], other[key]))), "")


def _numbers(value: Any) -> Any:
    """Return the bytes of an array; of a longdouble, which has bytes without meaning, its text."""
    array = np.asarray(value)
    return (
        array.astype(str).tolist()
        if array.dtype == np.longdouble
        else array.astype(array.dtype.newbyteorder("=")).tobytes()
    )


def _tensor(one: torch.Tensor, other: Any) -> str:
    if not isinstance(other, torch.Tensor):
        return f" tensor became {type(other).__name__}"
    plain_classes = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if type(one) is not type(other) and not (type(one) in plain_classes and type(other) in plain_classes):
        return f" {type(one).__name__} became {type(other).__name__}"
    if one.layout != other.layout or one.dtype != other.dtype:
        return f" {one.dtype} {one.layout} became {other.dtype} {other.layout}"
    if one.is_nested:
        return same(list(one.unbind()), list(other.unbind()))
    if one.shape != other.shape:
        return f" shape {one.shape} became {other.shape}"
    if isinstance(one, ScaledTensor) and isinstance(other, ScaledTensor):
        return "" if parts(one) == parts(other) else " has other parts"
    if isinstance(one, Tagged) and vars(one) != vars(other):
        return " has other attributes"
    if one.layout is not torch.strided:
        return "" if torch.equal(one.to_dense(), other.to_dense()) else " has other elements"
    if one.is_meta:
        return ""
    return "" if _bits(one) == _bits(other) else " has other bits"


def _bits(tensor: torch.Tensor) -> bytes:
    if tensor.is_quantized:
        return bytes(tensor.untyped_storage())
    resolved = tensor.detach().resolve_conj().resolve_neg()
    dense = resolved if resolved.is_contiguous() else resolved.contiguous()
    return bytes(dense.reshape(-1).view(torch.uint8).numpy())
