"""Cut the shards of a world again for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from keepstep.one_copy.copies.rank_state import Boxes, OtherModelError


@dataclass(frozen=True)
class Part:
    """A part of a parameter, and where a rank reads it."""

    source: int
    """Index of the rank that has it."""
    cut: list[list[int]]
    """First index and number of elements in each dimension of the shard of the source."""
    place: list[list[int]]
    """The same, of the shard that is filled."""


def plan_reads(needed: Boxes, held: Sequence[Boxes]) -> dict[str, list[Part]]:
    """Return the parts of which each needed shard consists.

    Args:
        needed: boxes of the new shards of this rank.
        held: boxes of the shards of each rank of the previous world, nearest ranks first.

    Raises:
        OtherModelError: a parameter has other names or shapes than before, or is not held as a whole.
    """
    if gone := sorted({name for boxes in held for name in boxes} - set(needed)):
        raise OtherModelError(
            f"build() returns another model than before: parameter {gone[0]!r} is missing; build must return the same "
            f"model for each number of ranks"
        )
    plan: dict[str, list[Part]] = {}
    for name, (whole, offset, shape) in needed.items():
        parts: list[Part] = []
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for source, boxes in enumerate(held):
            if name not in boxes or boxes[name][0] != whole:
                raise OtherModelError(
                    f"build() returns another model than before: parameter {name!r} of shape {tuple(whole)} was "
                    f"{tuple(boxes[name][0]) if name in boxes else 'missing'}; build must return the same model for "
                    f"each number of ranks"
                )
            _, start, length = boxes[name]
            key = tuple(start), tuple(length)
            if key in seen:  # a replica of a shard that another rank has too
                continue
            seen.add(key)
            first = [max(a, b) for a, b in zip(offset, start, strict=True)]
            last = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, start, length, strict=True)]
            count = [high - low for low, high in zip(first, last, strict=True)]
            if all(one > 0 for one in count):
                cut = [[low - base for low, base in zip(first, start, strict=True)], count]
                place = [[low - base for low, base in zip(first, offset, strict=True)], count]
                parts.append(Part(source, cut, place))
        covered = sum(_product(part.place[1]) for part in parts)
        if covered != _product(shape):
            raise OtherModelError(
                f"the shards of parameter {name!r} cannot be cut again: {covered} of {_product(shape)} elements at "
                f"{offset} are held, of shards at {[boxes[name][1:] for boxes in held]}; replace lost members, so that "
                f"the number of ranks stays"
            )
        if not parts:  # an empty shard; its counters come from any rank
            zeros = [[0] * len(shape), [0] * len(shape)]
            parts.append(Part(0, zeros, zeros))
        plan[name] = parts
    return plan


def read_shards(
    needed: Boxes, plan: Mapping[str, list[Part]], read: Callable[[int, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return the new shards of this rank, as ``RankState.load`` takes them.

    Args:
        needed: as for ``plan_reads``.
        plan: its result.
        read: returns cuts of the shard of a source, by names of parameters.
    """
    wanted: dict[int, dict[str, Any]] = {}
    for name, parts in plan.items():
        for part in parts:
            wanted.setdefault(part.source, {})[name] = part.cut
    given = {source: read(source, cuts) for source, cuts in sorted(wanted.items())}
    return {
        name: _joined(needed[name][2], [(part, given[part.source][name]) for part in parts])
        for name, parts in plan.items()
    }


def _joined(shape: Sequence[int], parts: Sequence[tuple[Part, dict[str, Any]]]) -> dict[str, Any]:
    """Join the state of a parameter from its parts."""
    first = parts[0][1]

    def join(pick: Callable[[dict[str, Any]], Any]) -> Any:
        sample = pick(first)
        if not isinstance(sample, torch.Tensor) or sample.shape != first["parameter"].shape or not len(shape):
            return sample.clone() if isinstance(sample, torch.Tensor) else sample
        whole = sample.new_empty(tuple(shape))
        for part, one in parts:
            whole[tuple(slice(low, low + count) for low, count in zip(*part.place, strict=True))] = pick(one)
        return whole

    return {
        "parameter": join(lambda one: one["parameter"]),
        "group": first["group"],
        "state": {key: join(partial(_state_of, key)) for key in first["state"]},
    }


def _state_of(key: str, one: dict[str, Any]) -> Any:
    return one["state"][key]


def _product(shape: Sequence[int]) -> int:
    total = 1
    for one in shape:
        total *= one
    return total
