"""The main replicas of all ranks cover each global value exactly once, or the error names key, chunk and ranks."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.sharded import CheckpointingException, ShardedObject, ShardedTensor, ShardedTensorFactory
from keepstep.sharded.validation import check_integrity, integrity_problems, pack_rows, row_of, unpack_rows


def rows(*ranks):
    """Return the rows of each rank as another rank reads them."""
    return [unpack_rows(pack_rows(row_of(leaf) for leaf in leaves)) for leaves in ranks]


def part(offset, size=2, whole=4, replica_id=0, **fields):
    """Elements of a tensor with one axis."""
    described = {"dtype": torch.float32, "axis_fragmentations": (whole // (size or 1),), **fields}
    shapes = {"local_shape": (size,), "global_shape": (whole,), "global_offset": (offset,)}
    return ShardedTensor("w", None, **shapes, **described, replica_id=replica_id)


def uneven(offset, size, whole=5, replica_id=0):
    return part(offset, size, whole, replica_id, axis_fragmentations=None)


def flat(start, stop, replica_id=0, offset=0):
    return part(offset, replica_id=replica_id, flattened_range=slice(start, stop))


def element(index, replica_id=0, shape=(2,)):
    return ShardedObject("rng", None, shape, (index,), replica_id)


FITTING = {
    "parts on two ranks": ([part(0)], [part(2)]),
    "replicas": ([part(0), part(2, replica_id=1)], [part(0, replica_id=1), part(2)]),
    "parts of different sizes": ([uneven(0, 2)], [uneven(2, 3)], [uneven(2, 3, replica_id=1)]),
    "ranges of one part": ([flat(0, 1), part(2, flattened_range=slice(0, 2))], [flat(1, 2)]),
    "empty ranges": ([flat(0, 2), part(2, flattened_range=slice(0, 2))], [flat(1, 1)], [flat(1, 1)]),
    "objects": ([element(0)], [element(1)], [element(1, replica_id=(0, 1))]),
    "an object of no axis": ([ShardedObject("o", None, (), ())],),
    "no element": ([part(0, 0, 0)], [part(0, 0, 0)]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("ranks", FITTING.values(), ids=FITTING)
def test_parts_that_fit_are_accepted(ranks) -> None:
    check_integrity(rows(*ranks))


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (([part(0)], []), r"'w': chunk \[2:4\] has no main replica: expected one rank that has it with replica_id 0"),
        (([part(0, replica_id=1)], [part(2)]), r"'w': chunk \[0:2\] has no main replica"),
        (([part(0, replica_id=1)],), r"'w': chunk \[0:2\] has no main replica"),
        (([part(0), part(2)], [part(2)]), r"'w': chunk \[2:4\] has 2 main replicas, on ranks 0, 1: expected one"),
        (([part(0, 2, 5)], [part(2, 2, 5)]), r"'w': chunk \[4:5\] has no main replica"),
        (([uneven(0, 2)], [uneven(3, 2)]), r"'w': chunk \[2:3\] has no main replica"),
        (([uneven(0, 3)], [uneven(2, 3)]), r"'w': the chunks \[0:3\] of rank 0 and \[2:5\] of rank 1 overlap"),
        (([part(0)], [uneven(2, 2, 4)]), r"'w': rank 0 has float32 .* but rank 1 has .* of different shapes"),
        (([part(0)], [part(0, 4)]), r"'w': rank 0 has .* in parts of shape \(2,\), but rank 1 .*\(4,\)"),
        (([part(0)], [part(2, 2, 8)]), r"'w': rank 0 has .* shape \(4,\) .* but rank 1 has .* shape \(8,\)"),
        (([part(0)], [part(2, dtype=torch.float64)]), r"'w': rank 0 has float32 .* but rank 1 has float64"),
        (([part(0)], [part(0, replica_id=1, dtype=torch.bfloat16)]), r"rank 1 has bfloat16"),
        (([part(0)], [flat(0, 2, offset=2)]), r"'w': rank 0 has .* but rank 1 has .* flattened"),
        (([flat(0, 1)], [flat(1, 2, offset=2)]), r"'w': chunk \[0:2\] has no main replica of its elements 1 to 2"),
        (([flat(1, 2)], []), r"'w': chunk \[0:2\] has no main replica of its elements 0 to 1"),
        (([flat(0, 2)], [flat(1, 2)]), r"'w': chunk \[0:2\] has two main replicas of .* 1 to 2, on ranks 0 and 1"),
        (([flat(0, 2)], []), r"'w': chunk \[2:4\] has no main replica"),
        (([element(0)], []), "'rng': object rng/shard_1_2 has no main replica"),
        (([element(0), element(1)], [element(1)]), "Duplicate ShardedObject keys: object rng/shard_1_2 has 2 main"),
        (([element(0)], [element(0, shape=(3,))]), r"'rng': rank 0 has objects of global shape \(2,\), but rank 1"),
        (([element(0, shape=(1,)), ShardedTensor.from_rank_offsets("rng", torch.zeros(1))],), "rank 0 has objects"),
    ],
)  # fmt: skip
def test_a_problem_names_key_chunk_and_ranks(ranks, problem) -> None:
    with pytest.raises(CheckpointingException, match=f"Invalid access pattern: .*{problem}"):
        check_integrity(rows(*ranks))


@settings(max_examples=60)
@given(st.data())
def test_the_answer_is_that_of_counting_every_element(data) -> None:
    """Boxes of random sizes, with random mains: compare with an array that counts the writers of each element."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    written = Counter[tuple[int, ...]]()
    ranks = []
    for _ in range(data.draw(st.integers(1, 4))):
        offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        box = tuple(data.draw(st.integers(0, size - at)) for at, size in zip(offset, shape, strict=True))
        leaf = ShardedTensor("w", None, torch.int8, box, shape, offset, None, data.draw(st.integers(0, 1)))
        written.update(
            product(*(range(at, at + size) for at, size in zip(offset, box, strict=True)))
            if leaf.replica_id == 0
            else ()
        )
        ranks.append([leaf])
    everything = product(*map(range, shape))
    assert (not integrity_problems(rows(*ranks))) == all(written[index] == 1 for index in everything)


def test_all_problems_are_counted_and_the_first_of_them_named() -> None:
    leaves = [ShardedObject(f"k{number}", None, (2,), (0,)) for number in range(8)]
    with pytest.raises(CheckpointingException, match=r"'k0': .*'k4': .* and 3 more$"):
        check_integrity(rows(reversed(leaves)))


def test_a_factory_has_no_row_of_its_own() -> None:
    with pytest.raises(CheckpointingException, match=r"ShardedTensorFactory 'f' as it is.*call apply_factories first"):
        row_of(ShardedTensorFactory("f", None, dict, torch.cat))


@pytest.mark.parametrize("sent", [b"", b"\xc1", pack_rows([])[:1], b"\x92\x01\x91\x91\x01", b"\x92\x02\x90"])
def test_rows_of_another_build_are_refused(sent) -> None:
    with pytest.raises(CheckpointingException, match="a rank sent"):
        unpack_rows(sent)


def test_a_thousand_ranks_are_checked_in_one_pass() -> None:
    """8 parts of each of 20 tensors, replicated 125 times. One pass for each rank and chunk would take minutes."""
    described = [
        [row_of(ShardedTensor.from_rank_offsets(f"w{number}", torch.empty(2, 8, device="meta"), (0, place, 8)))
         for number in range(20)]
        for place in range(8)
    ]  # fmt: skip
    ranks = [
        [row._replace(is_main=copy == 0) for row in described[place]] for copy, place in product(range(125), range(8))
    ]
    began = time.process_time()
    assert integrity_problems(ranks) == []
    assert time.process_time() - began < 5
    ranks[3][7] = ranks[3][7]._replace(is_main=False)
    assert integrity_problems(ranks) == [
        "'w7': chunk [6:8, 0:8] has no main replica: expected one rank that has it with replica_id 0"
    ]


def test_a_hole_in_a_huge_tensor_is_found_at_once() -> None:
    huge = ShardedTensor("w", None, torch.int8, (1,), (1 << 62,), (0,), (1 << 62,))
    assert "chunk [1:2] has no main replica" in integrity_problems(rows([huge]))[0]
    assert "chunk [0:1] has no main replica" in integrity_problems(rows([replace(huge, replica_id=1)]))[0]
