from __future__ import annotations

import pytest

from keepstep.one_copy.core.mesh_shape import MeshShape


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 4}, {"a": -1, "b": -1}, {"a": -1, "b": 0}, {"a": -2}])
def test_exactly_one_dimension_is_open(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="one dimension of size -1"):
        MeshShape(sizes)


def test_the_open_dimension_takes_the_ranks_that_are_there() -> None:
    shape = MeshShape({"pp": 2, "fsdp": -1, "tp": 2})
    assert shape.names == ("pp", "fsdp", "tp")
    assert [shape.fits(size) for size in (0, 2, 4, 6, 8)] == [False, False, True, False, True]
    assert shape.of(12) == (2, 3, 2)


def test_each_rank_has_a_group_in_each_dimension() -> None:
    rows, columns = MeshShape({"fsdp": -1, "tp": 2}).lines(3, 6)
    assert (rows.name, rows.ranks, rows.index) == ("fsdp", (1, 3, 5), 1)
    assert (columns.name, columns.ranks, columns.index) == ("tp", (2, 3), 1)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_multiple_of_members_fills_the_mesh_and_no_other_number_does(ranks: int) -> None:
    mesh = MeshShape({"fsdp": -1, "tp": 4, "pp": 3})
    filling = [members for members in range(1, 49) if mesh.fits(members * ranks)]
    assert filling == [members for members in range(1, 49) if members % mesh.multiple(ranks) == 0]


@pytest.mark.parametrize(
    ("sizes", "size"), [({"fsdp": -1}, 3), ({"fsdp": -1, "tp": 2}, 6), ({"a": 2, "b": -1, "c": 3}, 12)]
)
def test_all_ranks_agree_on_their_groups(sizes: dict[str, int], size: int) -> None:
    lines = {rank: MeshShape(sizes).lines(rank, size) for rank in range(size)}
    by_number: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for rank, own in lines.items():
        for line in own:
            assert line.ranks[line.index] == rank
            by_number.setdefault(line.number, set()).add((line.name, line.ranks))
    assert all(len(one) == 1 for one in by_number.values()), "groups of one number have the same ranks"
    assert len({one for found in by_number.values() for one in found}) == len(by_number)
