"""The helpers give the answers of Megatron Core's own, wherever docs/sharded.md names no difference.

``KEEPSTEP_MEGATRON_PYTHON`` names the Python of an environment with megatron-core; docs/testing.md shows how to make
one. Several, separated by colons, are asked one after the other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
from functools import cached_property
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import sharded_calls

VARIABLE = "KEEPSTEP_MEGATRON_PYTHON"
PYTHONS = [one for one in os.environ.get(VARIABLE, "").split(os.pathsep) if one]

pytestmark = [
    pytest.mark.skipif(not PYTHONS, reason=f"{VARIABLE} is not set: docs/testing.md, beside Megatron Core"),
    pytest.mark.timeout(600),
]
examples = settings(max_examples=60, suppress_health_check=list(HealthCheck))


versions = itertools.count(1)


class Peer:
    """Megatron Core in a process, and keepstep in this one."""

    def __init__(self, python: str) -> None:
        script = Path(sharded_calls.__file__)
        self._process = subprocess.Popen(
            [python, str(script), "megatron.core.dist_checkpointing"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._own = sharded_calls.Calls("keepstep.sharded")

    @cached_property
    def has_ranges(self) -> bool:
        """Versions from 0.16 on have no ``flattened_range``."""
        return "error" not in self.theirs("flat", [4], [], 0, 2, [0, 4])

    def theirs(self, name, *arguments):
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"{self._process.args[0]} ended: run it with {self._process.args[1:]} to see why"
        return json.loads(answer)

    def own(self, name, *arguments):
        """Return our answer, as JSON."""
        return json.loads(json.dumps(self._own.answer(name, list(arguments))))

    def both(self, name, *arguments):
        """Return our answer and theirs, as JSON."""
        return self.own(name, *arguments), self.theirs(name, *arguments)

    def close(self) -> None:
        with self._process:
            self._process.stdin.close()
        assert self._process.returncode == 0


@pytest.fixture(scope="module", params=PYTHONS)
def peer(request):
    started = Peer(request.param)
    try:
        yield started
    finally:
        started.close()


def trees(leaves, lists=True):
    names = st.sampled_from(["a", "b", "c"])
    return st.recursive(
        leaves,
        lambda inner: (
            (st.lists(inner, max_size=3).map(lambda one: {"list": one}) if lists else st.nothing())
            | st.dictionaries(names, inner, max_size=3).map(lambda one: {"dict": [list(pair) for pair in one.items()]})
        ),
        max_leaves=8,
    )


def containers(leaves, lists=True):
    return trees(leaves, lists).filter(lambda tree: isinstance(tree, dict) and tree.keys() & {"dict", "list"})


INTEGERS = st.integers(0, 9)
VALUES = INTEGERS | st.just({"tuple": [1]})
KEYS = st.text("ab.", min_size=1, max_size=3)
LEAVES = INTEGERS | st.tuples(st.sampled_from(sharded_calls.KINDS), KEYS).map(lambda one: {"leaf": list(one)})
FACTORIES = INTEGERS | KEYS.map(lambda key: {"leaf": ["factory", key]})


@examples
@given(tree=containers(VALUES), as_dicts=st.booleans())
def test_nested_dicts_are_split_mapped_and_walked_equally(peer, tree, as_dicts) -> None:
    assert peer.own("extract", tree, as_dicts) == peer.theirs("extract", tree, as_dicts)
    assert peer.own("maps", tree) == peer.theirs("maps", tree)
    assert peer.own("walks", tree) == peer.theirs("walks", tree)


@examples
@given(left=trees(VALUES), right=trees(VALUES), dicts=st.tuples(*[trees(INTEGERS, lists=False)] * 2))
def test_nested_dicts_are_merged_and_compared_equally(peer, left, right, dicts) -> None:
    assert peer.own("merge", left, right) == peer.theirs("merge", left, right)
    assert peer.own("diff", *dicts) == peer.theirs("diff", *dicts)


@examples
@given(values=st.lists(INTEGERS))
def test_values_are_grouped_equally(peer, values) -> None:
    assert peer.own("map_reduce", values) == peer.theirs("map_reduce", values)


@examples
@given(tree=containers(LEAVES), prefix=st.sampled_from(["", "x."]), mapping=st.dictionaries(KEYS, KEYS, max_size=3))
def test_keys_are_changed_and_leaves_extracted_equally(peer, tree, prefix, mapping) -> None:
    assert peer.own("prefixes", tree, prefix, mapping) == peer.theirs("prefixes", tree, prefix, mapping)


@examples
@given(tree=containers(FACTORIES))
def test_factories_are_applied_and_merged_equally(peer, tree) -> None:
    assert peer.own("factories", tree) == peer.theirs("factories", tree)


SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def rank_offsets(draw, axes):
    named = draw(st.lists(st.integers(0, max(axes - 1, 0)), unique=True, max_size=axes))
    return [[axis, draw(st.integers(-1, 3)), draw(st.integers(0, 4))] for axis in named]


@examples
@given(data=st.data(), shape=SHAPES, prepended=st.integers(0, 2))
def test_parts_are_described_and_narrowed_equally(peer, data, shape, prepended) -> None:
    offsets = data.draw(rank_offsets(len(shape) + prepended))
    own, theirs = peer.both("from_rank_offsets", shape, offsets, prepended)
    assert own == theirs
    assume("error" not in own and shape and 0 not in shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    cut = [dim, start, data.draw(st.integers(0, shape[dim] - start))]
    assert peer.own("narrow", shape, offsets, prepended, cut) == peer.theirs("narrow", shape, offsets, prepended, cut)
    if peer.has_ranges and not prepended:
        count = math.prod(shape)
        begin = data.draw(st.integers(0, count))
        end = data.draw(st.integers(begin, count))
        first = data.draw(st.integers(0, shape[0]))
        length = data.draw(st.integers(0, shape[0] - first))
        assume(begin < end and length)
        assert peer.own("flat", shape, offsets, begin, end, [first, length]) == peer.theirs(
            "flat", shape, offsets, begin, end, [first, length]
        )


@examples
@given(data=st.data(), shape=SHAPES)
def test_a_part_that_keepstep_accepts_is_accepted_by_megatron(peer, data, shape) -> None:
    axes = st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape))
    fields = {
        "local_shape": shape,
        "global_shape": data.draw(axes | st.lists(st.integers(0, 4), max_size=3)),
        "global_offset": data.draw(axes | st.lists(st.integers(0, 4), max_size=3)),
        "axis_fragmentations": data.draw(axes | st.none()),
        "prepend_axis_num": data.draw(st.integers(0, 1)),
    }
    own, theirs = peer.both("tensor", fields)
    if "error" not in own:
        assert own == theirs
    elif "error" not in theirs:  # a part outside of its global tensor, or fragmentations of other axes
        box = [1] * fields["prepend_axis_num"] + shape
        inside = zip(fields["global_offset"], box, fields["global_shape"], strict=True)
        fragments = fields["axis_fragmentations"]
        is_outside = any(offset + size > whole for offset, size, whole in inside)
        assert is_outside or (fragments is not None and len(fragments) != len(fields["global_shape"]))


@examples
@given(key=st.text("abc.", min_size=1), place=st.lists(st.tuples(st.integers(0, 3), st.integers(4, 5)), min_size=1))
def test_objects_have_equal_unique_keys(peer, key, place) -> None:
    assert peer.own("unique_key", key, [size for _, size in place], [at for at, _ in place]) == peer.theirs(
        "unique_key", key, [size for _, size in place], [at for at, _ in place]
    )


@examples
@given(replica_id=INTEGERS | st.lists(st.integers(0, 1)))
def test_the_main_replica_is_the_same(peer, replica_id) -> None:
    assert peer.own("main_replica", replica_id) == peer.theirs("main_replica", replica_id)


@examples
@given(data=st.data(), count=st.integers(1, 4))
def test_optimizer_state_is_sharded_equally(peer, data, count) -> None:
    tracked = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count))
    exclude = data.draw(st.sampled_from([["step"], ["step", "exp_avg"], []]))
    own, theirs = peer.both("optimizer_state", count, tracked, exclude)
    assert own == theirs or (own.keys() == theirs.keys() == {"error"})


BIT = st.integers(0, 1)
PARTS = st.tuples(st.just("tensor"), BIT, st.integers(2, 3), BIT) | st.tuples(st.just("object"), BIT, st.just(2), BIT)


@examples
@given(ranks=st.lists(st.lists(PARTS, max_size=4), min_size=1, max_size=3))
def test_the_same_shardings_are_valid(peer, ranks) -> None:
    assert peer.own("is_sharding_valid", ranks) == peer.theirs("is_sharding_valid", ranks)


def test_strict_flags_mean_the_same(peer) -> None:
    for value in ("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
                  "return_unexpected", "return_all", "ignore_all", "strict"):  # fmt: skip
        assert peer.own("strict", value) == peer.theirs("strict", value)


HELD = st.tuples(st.text("abcdef", min_size=1, max_size=3), st.sets(st.integers(0, 3), min_size=1), INTEGERS)


@examples
@given(parts=st.lists(HELD, unique_by=lambda part: part[0]))
def test_parts_are_distributed_equally(peer, parts) -> None:
    assert peer.own("distribution", [[name, sorted(holders), size] for name, holders, size in parts], 4) == peer.theirs(
        "distribution", [[name, sorted(holders), size] for name, holders, size in parts], 4
    )


def test_every_public_name_can_be_imported_from_where_megatron_core_has_it(peer) -> None:
    found = peer.theirs("names")
    assert len(found) > 15, found
    places = [(module, name) for module, names in found.items() for name in names]
    assert [one for one in places if not peer.own("has", *one)] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("parts", [1, 3])
def test_parts_that_dcp_saves_are_loaded_with_the_classes_of_the_other_library(peer, tmp_path, parts) -> None:
    for number, (saver, loader) in enumerate(itertools.product((peer.own, peer.theirs), repeat=2)):
        place = str(tmp_path / str(number))
        saved = saver("by_dcp", place, "save", parts)
        assert saved == loader("by_dcp", place, "load", 4) == [[12], [float(one) for one in range(12)]]


NOT_RAISED = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")


@pytest.mark.parametrize("requested", [["a", "b"], ["a"], ["a", "b", "c"], ["a", "c"]], ids="".join)
@pytest.mark.parametrize("strict", ["raise_unexpected", "raise_all", *NOT_RAISED])
def test_strategies_of_a_script_are_called_equally_with_equal_results(peer, tmp_path, strict, requested) -> None:
    number = next(versions)
    own, theirs = (
        json.loads(json.dumps(call("own_strategies", str(tmp_path / "state"), strict, requested, number)))
        for call in (peer.own, peer.theirs)
        if not shutil.rmtree(tmp_path / "state", ignore_errors=True)
    )
    assert own == theirs
