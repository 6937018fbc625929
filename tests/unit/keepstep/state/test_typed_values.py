"""Values travel with their type, and a load makes nothing of a class that it does not know."""

from __future__ import annotations

import io
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum, Flag, IntEnum
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from torch import nn

from keepstep.checkpointing import UnsupportedValue
from keepstep.state.errors import StateMismatch
from keepstep.state.state_bytes import load_state, save_state
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import Origin, chunk_digests, pack_envelope

STEPS = 20


class Mode(Enum):
    WARM = "warm"


class Level(IntEnum):
    HIGH = 3


class Option(Flag):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: int
    where: Any


class Settings(dict):
    pass


class Steps(int):
    pass


class Blob(bytes):
    pass


class Name(str):
    __slots__ = ()


def round_trip(state, into=None):
    manifest, pack = save_state(state)
    return load_state(manifest, bytes(pack), into)


def opened(content, at):
    file = io.BytesIO(content)
    file.seek(at)
    return file


def everything():
    settings = Settings(rate=0.1)
    settings.origin = "file"
    return {
        "counter": Counter({30: 2, 80: 1}),
        "default": defaultdict(list, {"loss": [1.5, torch.ones(2)]}),
        "none": defaultdict(None, {1: 2}),
        "deque": deque([1, torch.arange(3)], maxlen=5),
        "enum": Mode.WARM,
        "level": Level.HIGH,
        "flag": Option.ONE | Option.TWO,
        "point": Point(1, torch.zeros(2)),
        "path": pathlib.Path("/data/run 1"),
        "pure": pathlib.PurePosixPath("a/b"),
        "bytearray": bytearray(b"abc"),
        "long bytearray": bytearray(bytes(10_000)),
        "file": opened(b"abc", at=2),
        "long file": opened(bytes(10_000), at=10_000),
        "settings": settings,
        "steps": Steps(7),
        "name": Name("x"),
        "blob": Blob(bytes(10_000)),
        "version": torch.__version__,
        "keys": {Mode.WARM: 1, Point(1, 2): 2, (Level.HIGH, 1): 3},
        "sets": {Mode.WARM, (1, 2)},
        "scheme": torch.per_channel_affine,
        "dtype": torch.qint8,
        "layout": torch.strided,
        "format": torch.channels_last,
        "scalars": [np.float64(1.5), np.str_("a"), torch.Size([1, 2]), True],
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    if type(one) is not type(other) or getattr(one, "__dict__", None) != getattr(other, "__dict__", None):
        return False
    if isinstance(one, io.BytesIO):
        return (one.getvalue(), one.tell()) == (other.getvalue(), other.tell())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def registered():
    classes = [Mode, Level, Option, Point, Settings, Steps, Name, Blob]
    with torch.serialization.safe_globals(classes):
        yield


def test_values_travel_with_the_classes_that_are_registered(registered):
    state = everything()
    loaded = round_trip(state)
    for key, value in state.items():
        assert same(value, loaded[key]), key
    assert loaded["deque"].maxlen == 5
    assert loaded["default"].default_factory is list


def test_values_travel_without_a_registration_where_the_receiver_has_one_of_the_class():
    state, into = everything(), everything()
    loaded = round_trip(state, into)
    for key, value in state.items():
        assert same(value, loaded[key]), key
    assert loaded["deque"][1] is into["deque"][1], "received in place"
    assert loaded["point"].where is into["point"].where


@pytest.mark.parametrize("value", [Mode.WARM, Point(1, 2), Settings(a=1), Steps(1)])
def test_a_class_that_is_not_known_is_an_error_that_says_what_to_do(value):
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    with pytest.raises(StateMismatch, match=rf"state\['v'\] is a {name}, .*add_safe_globals\(\[{kind.__name__}\]"):
        round_trip({"v": value})


class Slotted(list):
    __slots__ = ("more",)


class CountingDefault(defaultdict):
    pass


@pytest.mark.parametrize("value", [defaultdict(lambda: 1), Slotted(), CountingDefault(int)])
def test_a_value_with_more_than_can_be_stored_is_named(value):
    with pytest.raises(UnsupportedValue, match=r"state\['v'\]"):
        save_state({"v": value})


def test_a_multistep_schedule_heals_into_one_with_other_milestones():
    def schedule(milestones):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)

    source, joiner = schedule([3, 5]), schedule([100])
    joiner.load_state_dict(round_trip(source.state_dict(), joiner.state_dict()))
    assert joiner.milestones == Counter({3: 1, 5: 1})
    for _ in range(STEPS):
        for one in (source, joiner):
            one.optimizer.step()
            one.step()
    assert source.get_last_lr() == joiner.get_last_lr() == [pytest.approx(0.01)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.quint8),
        lambda: torch.quantize_per_channel(
            torch.randn(3, 4), torch.rand(3) + 0.1, torch.tensor([0, 1, 2]), 0, torch.qint8
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_tensor_keeps_its_integers_and_scales(make):
    value = make()
    loaded = round_trip({"v": value, "bias": torch.ones(1)})["v"]
    assert loaded.dtype is value.dtype
    assert loaded.qscheme() is value.qscheme()
    assert torch.equal(loaded.int_repr(), value.int_repr())
    assert torch.equal(loaded.dequantize(), value.dequantize())


def hostile(tree):
    content = msgpack.packb([tree, [], []])
    return pack_envelope(Origin(), content, b"".join(chunk_digests([])))


@pytest.mark.parametrize(
    "tree",
    [
        ["instance", "collections.Counter", ["list", 1], None],
        ["instance", "collections.Counter", ["tensor"], None],
        ["instance", "os.system", "true", None],
        ["instance", ["list"], "true", None],
        ["enum", "os.system", "true"],
        ["enum", "collections.Counter", 1],
        ["defaultdict", "eval", ["dict"]],
        ["defaultdict", ["list"], ["dict"]],
        ["deque", "x"],
        ["deque"],
        ["deque", 2**63],
        ["dict", [["list"], 1], 1],
        ["set", [{}, 1]],
        ["path", "Path"],
        ["path", "PosixPath", 5],
        ["bytearray", "x"],
        ["bytesio", 0, "x"],
        ["bytesio", -1, b""],
        ["bytesio", "x", b""],
        ["bytesio", b""],
        ["wrapped", "os.system", [1], [1], None],
        ["wrapped", "collections.Counter", [1], [1], None],
        ["wrapped", "torch.Tensor", ["x"], [1], None],
        ["wrapped", "torch.Tensor"],
        ["shard", [1], [0], [1], ["names"], ["names"]],
        ["shard", [1], [0], [1], [], ["names"], None],
        ["quantized", None],
        ["quantized", ["dtype", "qint8"], 5, 1.0, 0, None],
        ["dict", ["deque", None], 1],
        ["set", ["bytearray", b""]],
        ["qscheme", "x"],
    ],
)
def test_a_hostile_node_is_an_error_and_runs_nothing(tree):
    with pytest.raises((ManifestError, StateMismatch)):
        load_state(hostile(tree), b"")


def test_an_ordered_dict_subclass_keeps_its_order():
    class Ordered(OrderedDict):
        pass

    value = Ordered([("b", 1), ("a", torch.ones(1))])
    value.move_to_end("b")
    assert list(round_trip({"v": value}, {"v": Ordered()})["v"]) == ["a", "b"]
