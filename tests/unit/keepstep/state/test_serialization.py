"""Every state that is saved comes back bit for bit: in new memory, and in place."""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keepstep.checkpointing import TransferError, UnsupportedValue
from keepstep.state.state_bytes import load_state, save_state, state_root
from keepstep.state.state_manifest import read_manifest
from keepstep.state.values.leaves import TORCH_DTYPES
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, Origin

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def raw_bytes(tensor):
    bits = tensor.detach().resolve_conj().resolve_neg().view(BITS[tensor.itemsize])
    return torch.empty(bits.shape, dtype=bits.dtype).copy_(bits).reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one, other):
    """Equal in type and in every bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and raw_bytes(one) == raw_bytes(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (float, complex, np.generic)):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return one == other


def round_trip(state, into=None):
    manifest, pack = save_state(state)
    return load_state(manifest, bytes(pack), into)


def tensor_of(dtype, shape, data):
    count = int(np.prod(shape)) * dtype.itemsize
    values = bytes(byte & 1 for byte in data) if dtype is torch.bool else data
    filled = (values * (count // max(1, len(values)) + 1))[:count] or b""
    return torch.tensor(list(filled), dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def tensors(draw):
    dtype = TORCH_DTYPES[draw(st.sampled_from(sorted(TORCH_DTYPES)))]
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    tensor = tensor_of(dtype, shape, draw(st.binary(min_size=1, max_size=64)))
    change = draw(st.sampled_from(["none", "transposed", "strided", "offset", "expanded"]))
    if change == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if change == "strided" and tensor.ndim:
        return tensor[..., ::2]
    if change == "offset" and tensor.ndim:
        return tensor[1:]
    if change == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


NUMPY_DTYPES = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.floating_dtypes(sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(sizes=(64, 128))
    | hnp.unicode_string_dtypes(max_len=5)
    | hnp.byte_string_dtypes(max_len=5)
    | hnp.datetime64_dtypes()
    | hnp.timedelta64_dtypes()
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**60), max_value=10**60)
    | st.floats()
    | st.complex_numbers()
    | TEXTS
    | st.binary(max_size=40)
    | st.datetimes(timezones=st.none() | st.just(dt.UTC) | st.just(dt.timezone(dt.timedelta(hours=-3, minutes=-30))))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.lists(st.integers(0, 99), max_size=4).map(torch.Size)
    | st.sampled_from(list(TORCH_DTYPES.values()))
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")])
)
ARRAYS = hnp.arrays(NUMPY_DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
LEAVES = SCALARS | tensors() | ARRAYS | ARRAYS.filter(lambda array: array.size).map(lambda array: array.reshape(-1)[0])
HASHABLE = TEXTS | st.integers() | st.booleans() | st.none() | st.binary(max_size=8)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE | st.tuples(HASHABLE, HASHABLE), inner, max_size=4)
        | st.dictionaries(TEXTS, inner, max_size=3).map(OrderedDict)
        | st.sets(HASHABLE, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
    ),
    max_leaves=12,
)
many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(STATES)
def test_any_state_comes_back_bit_for_bit(state):
    assert same(round_trip(state), state)


@many
@given(STATES)
def test_the_same_state_gives_the_same_bytes(state):
    manifest, pack = save_state(state)
    again, pack_again = save_state(state)
    assert manifest == again
    assert bytes(pack) == bytes(pack_again)


@many
@given(STATES)
def test_the_root_of_any_state_is_that_of_the_state_that_comes_back(state):
    assert state_root(state) == state_root(round_trip(state))


@many
@given(STATES)
def test_the_root_of_any_state_is_the_same_in_another_order_of_keys(state):
    assert state_root(state) == state_root(reversed_keys(state))


def reversed_keys(value):
    if isinstance(value, dict):
        turned = type(value)((key, reversed_keys(value[key])) for key in reversed(value))
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            turned._metadata = value._metadata
        return turned
    return type(value)(map(reversed_keys, value)) if type(value) in (list, tuple) else value


def test_the_root_of_one_element_does_not_depend_on_its_stride():
    one = torch.arange(3, dtype=torch.bfloat16)[1::2]
    assert one.stride() == (2,)
    assert state_root(one) == state_root(torch.ones(1, dtype=torch.bfloat16))


def test_the_root_does_not_depend_on_memory_and_does_on_every_value():
    image = torch.randn(2, 3, 4, 4)
    tied = torch.randn(5)
    equal = [
        {"image": image, "tied": [tied, tied]},
        {"tied": [tied, tied.clone()], "image": image.to(memory_format=torch.channels_last)},
        {"image": torch.cat([image, image])[2:], "tied": [torch.stack([tied, tied], 1)[:, 1], tied]},
    ]
    assert len({state_root(one) for one in equal}) == 1
    others = [
        {"image": image, "tied": [tied, tied + 1]},
        {"image": image.mT, "tied": [tied, tied]},
        {"image": image, "tied": (tied, tied)},
        {"image": image, "tied": [tied]},
        {"image": image, "ties": [tied, tied]},
        {"image": image.view(2, 3, 16), "tied": [tied, tied]},
        {"image": image, "tied": [tied, tied.view(torch.int32)]},
    ]
    assert len({state_root(one) for one in (equal[0], *others)}) == len(others) + 1


@pytest.mark.parametrize("sizes", [[CHUNK_BYTES], [CHUNK_BYTES - 1, 5, CHUNK_BYTES], [3, 2 * CHUNK_BYTES + 1], []])
def test_the_root_of_states_longer_than_a_chunk_depends_on_each_of_their_bits(sizes):
    state = [torch.randint(255, (size,), dtype=torch.uint8) for size in sizes]
    root = state_root(state)
    assert root == state_root([tensor.clone() for tensor in state])
    for tensor in state:
        tensor[-1] ^= 1
        assert state_root(state) != root, "a flipped bit"
        tensor[-1] ^= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_root_of_a_state_is_the_same_on_a_gpu():
    state = [torch.randn(CHUNK_BYTES // 2), torch.randn(3, 5).T, torch.randn(4, 6)[:, ::2]]
    assert state_root([tensor.cuda() for tensor in state]) == state_root(state)


@many
@given(STATES)
def test_any_state_comes_back_into_another_of_the_same_structure(state):
    into = round_trip(state)
    for tensor in tensors_of(into):
        if tensor.numel():
            tensor.view(BITS[tensor.itemsize]).fill_(1)
    assert same(round_trip(state, into), state)


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif type(state) in (list, tuple):
        for value in state:
            yield from tensors_of(value)


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (1, 2, 3, 4)])
def test_tensors_of_every_dtype_and_shape_come_back(name, shape):
    tensor = tensor_of(TORCH_DTYPES[name], shape, bytes(range(251)))
    assert same(round_trip(tensor), tensor)
    into = torch.zeros_like(tensor.view(torch.uint8) if shape else tensor.reshape(1).view(torch.uint8)).view(
        tensor.dtype
    )
    into = into.reshape(shape)
    result = round_trip([tensor], [into])[0]
    assert result is into
    assert same(into, tensor)


def test_tied_weights_are_stored_once_and_tied_again():
    weight = torch.randn(100, 100)
    manifest, pack = save_state({"embedding": weight, "head": weight, "head_t": weight.t(), "row": weight[7]})
    assert len(pack) == weight.nbytes
    state = load_state(manifest, pack)
    assert state["embedding"].data_ptr() == state["head"].data_ptr() == state["head_t"].data_ptr()
    state["row"].fill_(5)
    assert state["embedding"][7].eq(5).all()
    assert state["head_t"].stride() == (1, 100)


def test_views_of_one_buffer_that_do_not_overlap_are_stored_without_the_rest_of_it():
    buffer = torch.randn(1_000_000)
    state = [buffer[:10], buffer[10:20], buffer[999_990:]]
    manifest, pack = save_state(state)
    assert len(pack) < 1000
    assert same(load_state(manifest, pack), state)


def test_views_of_different_dtypes_share_their_bytes():
    buffer = torch.arange(64, dtype=torch.uint8)
    state = {"bytes": buffer[3:], "floats": buffer[4:60].view(torch.float32)}
    loaded = round_trip(state)
    assert same(loaded, state)
    loaded["bytes"].zero_()
    assert loaded["floats"].eq(0).all()


def test_a_tied_state_loads_into_an_untied_one_and_the_other_way_round():
    weight = torch.randn(8, 8)
    untied = {"a": torch.zeros(8, 8), "b": torch.zeros(8, 8)}
    result = round_trip({"a": weight, "b": weight}, untied)
    assert result["a"] is untied["a"]
    assert result["b"] is untied["b"]
    assert same(untied, {"a": weight, "b": weight})
    tied = torch.zeros(8, 8)
    last = torch.randn(8, 8)
    assert round_trip({"a": weight, "b": last}, {"a": tied, "b": tied})["b"] is tied
    assert same(tied, last)


def test_the_order_of_memory_is_kept():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert round_trip(image).is_contiguous(memory_format=torch.channels_last)
    into = torch.zeros(2, 3, 4, 5)
    assert round_trip([image], [into])[0] is into
    assert same(into, image)


def test_conjugate_and_negative_views_come_back_as_their_values():
    value = torch.randn(4, dtype=torch.complex64)
    assert same(round_trip([value.conj(), value.conj().imag]), [value.conj(), value.conj().imag])


def test_loading_into_a_state_writes_its_own_memory():
    model = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.BatchNorm1d(60))
    other = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.BatchNorm1d(60))
    addresses = [value.data_ptr() for value in other.state_dict().values()]
    loaded = round_trip({"model": model.state_dict()}, {"model": other.state_dict()})
    assert [value.data_ptr() for value in loaded["model"].values()] == addresses
    assert same(other.state_dict(), model.state_dict())
    assert loaded["model"]._metadata == model.state_dict()._metadata


def test_a_tensor_that_does_not_fit_is_new_and_the_target_is_untouched():
    into = {"shape": torch.zeros(4), "dtype": torch.zeros(3, dtype=torch.float64), "more": torch.zeros(2)}
    result = round_trip({"shape": torch.ones(3), "dtype": torch.ones(3), "new": torch.ones(1)}, into)
    assert same(result, {"shape": torch.ones(3), "dtype": torch.ones(3), "new": torch.ones(1)})
    assert all(value.eq(0).all() for value in into.values())


def test_numpy_arrays_load_in_place():
    array, into = np.arange(12.0).reshape(3, 4), np.zeros((3, 4))
    assert round_trip([array], [into])[0] is into
    assert same(into, array)
    turned = np.zeros((4, 3)).T
    assert round_trip([array], [turned])[0] is turned
    assert same(np.ascontiguousarray(turned), array)


def test_an_optimizer_and_its_random_state_come_back():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.default_rng(7).random(3),
    }
    assert same(round_trip(state), state)


def test_long_bytes_lie_in_the_pack():
    blob = bytes(range(256)) * 100_000
    manifest, pack = save_state({"blob": blob})
    assert len(manifest) < 1000 + len(pack) // CHUNK_BYTES * 16
    assert load_state(manifest, pack) == {"blob": blob}


def test_states_longer_than_a_chunk_are_put_together_over_the_borders():
    state = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (CHUNK_BYTES - 1, 3, CHUNK_BYTES + 7, 1, 70)]
    manifest, pack = save_state(state)
    assert len(read_manifest(manifest).chunk_digests) == 3
    assert same(load_state(manifest, pack), state)


def test_the_root_digest_tells_states_apart_but_not_their_producers():
    roots = [
        read_manifest(save_state(state, origin)[0]).root
        for state, origin in [
            ({"a": torch.ones(3)}, Origin("one", "job", 3, 4, "r0")),
            ({"a": torch.ones(3)}, Origin("two", "job", 3, 4, "r1")),
            ({"b": torch.ones(3)}, Origin()),
            ({"a": torch.ones(3, dtype=torch.int32)}, Origin()),
            ({"a": torch.ones(3), "n": 1}, Origin()),
            ({"a": torch.tensor([1.0, 1.0, 2.0])}, Origin()),
        ]
    ]
    assert roots[0] == roots[1]
    assert len(set(roots)) == 5


class Custom:
    pass


def nested(depth):
    state = []
    for _ in range(depth):
        state = [state]
    return state


def containing_itself():
    state = {}
    state["self"] = [state]
    return state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"user": {"model": [1, Custom()]}}, r"state\['user'\]\['model'\]\[1\] is a .*Custom"),
        ({"f": print}, r"state\['f'\]"),
        ({Custom: 1}, r"key of state\["),
        ({"d": torch.zeros(3).to_sparse()}, r"state\['d'\].*sparse"),
        ({"m": torch.zeros(3, device="meta")}, r"state\['m'\].*meta"),
        ({"q": np.array([object()])}, r"state\['q'\].*object"),
        ({"s": "\ud800"}, r"state\['s'\].*UTF-8"),
        ({"r": np.zeros(2, dtype=[("a", "i4")])}, r"state\['r'\]"),
        ({"i": 1 << 600_000}, r"state\['i'\].*bits"),
        (nested(100), r"nested more than 64 deep"),
        (containing_itself(), r"state\['self'\]\[0\] contains itself"),
        ({"z": dt.datetime(2026, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {})())}, r"state\['z'\]"),
    ],
)
def test_a_value_that_cannot_be_stored_is_an_error_that_names_its_path(state, words):
    with pytest.raises(UnsupportedValue, match=words):
        save_state(state)


def test_a_flipped_bit_in_the_pack_is_found():
    manifest, pack = save_state({"a": torch.randn(1000)})
    damaged = bytearray(pack)
    damaged[1234] ^= 4
    with pytest.raises(TransferError, match="chunk 0 is damaged"):
        load_state(manifest, damaged)
    with pytest.raises(TransferError, match="length of the pack: 3999 bytes"):
        load_state(manifest, pack[:-1])
