import pytest
import torch

from keepstep.one_copy.recovery.cutting_again import plan_reads, read_shards
from keepstep_mesh.errors import KeepstepError


def rows(count: int, parts: int) -> list[dict[str, list[list[int]]]]:
    """Boxes of a matrix of ``count`` rows, cut as FSDP2 cuts it."""
    size = -(-count // parts)
    cuts = [(min(count, size * one), min(count, size * (one + 1))) for one in range(parts)]
    return [{"w": [[count, 2], [first, 0], [last - first, 2]]} for first, last in cuts]


@pytest.mark.parametrize("count", [1, 3, 7, 8])
@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 5), (5, 1)])
def test_each_new_shard_is_joined_from_those_before(count: int, before: int, after: int) -> None:
    whole = torch.arange(count * 2.0).view(count, 2)
    held, needed = rows(count, before), rows(count, after)

    def read(source: int, cuts: dict[str, list[list[int]]]) -> dict[str, object]:
        _, (first, _), (length, _) = held[source]["w"]
        shard = whole[first : first + length]
        part = shard[tuple(slice(low, low + many) for low, many in zip(*cuts["w"], strict=True))]
        return {"w": {"parameter": part, "group": 0, "state": {"moment": part * 2, "step": torch.tensor(5.0)}}}

    for boxes in needed:
        _, (first, _), (length, _) = boxes["w"]
        found = read_shards(boxes, plan_reads(boxes, held), read)["w"]
        assert torch.equal(found["parameter"], whole[first : first + length])
        assert torch.equal(found["state"]["moment"], whole[first : first + length] * 2)
        assert found["state"]["step"] == 5.0


def test_another_model_and_missing_elements_are_refused() -> None:
    with pytest.raises(KeepstepError, match="build\\(\\) returns another model than before: parameter 'w'"):
        plan_reads(rows(8, 2)[0], rows(9, 2))
    with pytest.raises(KeepstepError, match="parameter 'w' cannot be cut again: 8 of 16 elements"):
        plan_reads(rows(8, 1)[0], rows(8, 2)[:1])
