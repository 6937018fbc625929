"""Compare what ``build`` has returned in all ranks, before they train with it. ``compare`` is pure.

* A DTensor is one parameter of all ranks of its mesh: they must have it in one shape, cut in one way, and step it with
  the same options.
* All ranks must have one class of optimizers, because a keeper replays the steps of another rank with its own; and the
  same arithmetic, for the same reason.
* All ranks must have states of the same names beside the model and the optimizer, since a rank loads those of another.
* Other tensors may differ by rank, as those of the stages of a pipeline do.

Ranks that have the state of the job decide; in the first quorum all ranks. The value of most of them is right. Without
a majority all are refused.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from keepstep.one_copy.copies.rank_state import RankState
from keepstep.one_copy.shard.own_shard import Held
from keepstep.script_checks.common_values import CommonValues
from keepstep.state.values.sharding import is_dtensor
from keepstep_mesh.text import listed

ORDER = "params"
"""Of the values of a param group: the order of its parameters, which may differ."""
MAX_NAMED = 4
MISSING = "missing"
Facts = dict[str, Any]
"""``all``: values by name; ``groups``: the options of each param group by name; ``meshes``: the ranks of each mesh;
``parameters``: by name of each DTensor its mesh, its layout, and its param group or None."""


@dataclass(frozen=True, slots=True)
class Told:
    """Digests of a rank, which it tells the others first."""

    digest: str
    """Of its facts."""
    of_step: int
    """``ComparedBuild.step_digest``."""
    problem: str = ""
    """Why its model does not fit the job; empty: it fits."""

    @classmethod
    def of(cls, data: bytes) -> Told:
        """Return what another rank tells."""
        return cls(*msgpack.unpackb(data))


def facts_of(data: bytes) -> Facts:
    """Return facts that are packed."""
    found: Facts = msgpack.unpackb(zlib.decompress(data))
    return found


class ComparedBuild:
    """The model and the optimizer that this rank has now. On the training thread."""

    def __init__(self) -> None:
        self._of: RankState | None = None
        self._values = CommonValues()
        self._meshes: list[list[int]] = []
        self._parameters: dict[str, Any] = {}

    def step_digest(self, held: Held) -> int:
        """Return a number of 56 bits: ranks that step with equal options, and equal arithmetic, have equal ones."""
        self._read(held)
        text = "\n\n".join(f"{owner}\n{lines}" for owner, lines in self._values.of_step())
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())

    def packed(self, held: Held, states: Iterable[str]) -> bytes:
        """Return the facts of this rank, with the options of now.

        Args:
            held: its shard.
            states: names of those beside model and optimizer.
        """
        self._read(held)
        *groups, last = self._values.of_step() or [("", "")]
        data = msgpack.packb(
            {
                "all": {
                    "optimizer": type(held.built.optimizer).__name__,
                    "states": ", ".join(sorted(states)) or "none",
                    **_pairs(last[1]),
                },
                "groups": [_pairs(lines) for _, lines in groups],
                "meshes": self._meshes,
                "parameters": self._parameters,
            }
        )
        return zlib.compress(data)

    def _read(self, held: Held) -> None:
        tensors = held.tensors
        if tensors is self._of:
            return
        self._of, self._values = tensors, CommonValues()
        self._values.add_module(tensors.model)
        self._values.add_optimizer(tensors.optimizer)
        group_of = {
            id(one): number for number, group in enumerate(tensors.optimizer.param_groups) for one in group["params"]
        }
        self._meshes, self._parameters = [], {}
        numbers: dict[int, int] = {}
        for name, one in zip(tensors.names, tensors.parameters, strict=True):
            if is_dtensor(one):
                mesh = one.device_mesh
                if id(mesh) not in numbers:
                    numbers[id(mesh)] = len(self._meshes)
                    self._meshes.append(mesh.mesh.flatten().tolist())
                layout = {"shape": str(tuple(one.shape)), "dtype": str(one.dtype), "placements": str(one.placements)}
                self._parameters[name] = [numbers[id(mesh)], layout, group_of.get(id(one))]


def _pairs(lines: str) -> dict[str, str]:
    pairs = (line.partition("\t") for line in lines.splitlines())
    return {name: text for name, _, text in pairs if name != ORDER}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a comparison."""

    odd: frozenset[int] = frozenset()
    """Ranks that differ from the others."""
    difference: str = ""
    """The first difference; empty: none."""


def compare(facts: Sequence[Facts], deciding: Collection[int], names: Sequence[str]) -> Verdict:
    """Compare the facts of all ranks.

    Args:
        facts: of each rank of the world, in order.
        deciding: ranks that have the state of the job; empty: all count.
        names: of the member of each rank.
    """
    values = [_values(one, rank) for rank, one in enumerate(facts)]
    for key in dict.fromkeys(key for one in values for key in one):
        (owner, name), sharing = key[:2], key[2]
        among = [rank for rank in (sharing or range(len(facts))) if rank < len(facts)]
        found = {rank: values[rank].get(key, MISSING) for rank in among}
        if len(set(found.values())) < 2:
            continue
        votes = Counter(found[rank] for rank in among if rank in deciding) or Counter(found.values())
        right, count = votes.most_common(1)[0]
        decided = 2 * count > votes.total()
        odd = frozenset(rank for rank in among if not decided or found[rank] != right)
        sides = {text: [names[rank] for rank in among if found[rank] == text] for text in dict.fromkeys(found.values())}
        told = ", ".join(f"{text} in {listed(list(dict.fromkeys(of)), MAX_NAMED)}" for text, of in sides.items())
        end = "" if decided else "; no side has a majority, so all are refused"
        return Verdict(odd, f"{name} of {owner}: {told}{end}" if owner else f"{name}: {told}{end}")
    return Verdict()


_Key = tuple[str, str, tuple[int, ...]]


def _values(facts: Facts, rank: int) -> dict[_Key, str]:
    return dict(_of_rank(facts, rank))


def _of_rank(facts: Facts, rank: int) -> Iterator[tuple[_Key, str]]:
    """Yield all values of a rank: layouts of all parameters before their options."""
    for name, text in facts["all"].items():
        yield ("", name, ()), text
    shared: Mapping[str, Any] = facts["parameters"]
    meshes = [tuple(ranks) for ranks in facts["meshes"]]
    for parameter, (mesh, layout, _) in shared.items():
        if rank in meshes[mesh]:
            for name, text in layout.items():
                yield (f"parameter {parameter!r}", name, meshes[mesh]), text
    for parameter, (mesh, _, group) in shared.items():
        if rank in meshes[mesh]:
            options = {"optimizer": "none"} if group is None else facts["groups"][group]
            for name, text in options.items():
                yield (f"parameter {parameter!r}", name, meshes[mesh]), text
