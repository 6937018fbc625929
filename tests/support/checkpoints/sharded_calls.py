"""Calls of the helpers of sharded state, in keepstep or in Megatron Core: both have the same names.

``python sharded_calls.py PACKAGE`` reads a call from each line of standard input, ``[name, arguments]`` as JSON, and
writes its answer to a line of standard output. The Python of either library runs it, so it imports nothing of tests.

Trees travel as ``{"dict": [[key, value], ...]}``, ``{"list": [...]}``, ``{"tuple": [...]}`` and
``{"leaf": [kind, key]}``. An exception is the answer ``{"error": its type}``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import torch
import torch.distributed.checkpoint

KINDS = ("tensor", "object", "factory", "local")
EXTRACTS = (
    "extract_sharded_tensors",
    "extract_sharded_tensors_and_factories",
    "extract_sharded_tensors_or_nonpersistent",
    "extract_sharded_base",
    "extract_nonpersistent",
)


class Calls:
    """The calls, each a method.

    Args:
        package: import name of the library.
    """

    def __init__(self, package: str) -> None:
        module: Callable[[str], Any] = lambda name: import_module(f"{package}.{name}")  # noqa: E731
        self.dict_utils, self.mapping, self.optimizer = map(module, ("dict_utils", "mapping", "optimizer"))
        self.utils, self.validation = map(module, ("utils", "validation"))
        self.package, self.root, self.base = package, import_module(package), module("strategies.base")
        self.is_megatron = package.startswith("megatron")
        self.exchange = module("exchange_utils")
        if self.is_megatron:
            torch.distributed.get_rank = lambda *_, **__: 0  # rank 0 alone validates
            self._store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=self._store, rank=0, world_size=1)

    def answer(self, name: str, arguments: list[Any]) -> Any:
        try:
            return getattr(self, name)(*arguments)
        except Exception as error:  # noqa: BLE001  an answer as well
            return {"error": type(error).__name__}

    # ---- trees

    def read(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "dict":
            return {key: self.read(value) for key, value in content}
        if kind == "list":
            return [self.read(value) for value in content]
        if kind == "tuple":
            return tuple(self.read(value) for value in content)
        return self.leaf(*content)

    def leaf(self, kind: str, key: str) -> Any:
        made: dict[str, Callable[[], Any]] = {
            "tensor": lambda: self.mapping.ShardedTensor.from_rank_offsets(key, torch.arange(2.0)),
            "object": lambda: self.mapping.ShardedObject(key, None, (1,), (0,)),
            "factory": lambda: self.mapping.ShardedTensorFactory(key, torch.arange(4.0), self.halves, self.joined),
            "local": lambda: self.mapping.LocalNonpersistentObject(key),
        }
        return made[kind]()

    def halves(self, key: str, data: Any, *_: Any) -> Any:
        make = self.mapping.ShardedTensor.from_rank_offsets
        return {name: make(f"{key}.{name}", data[at : at + 2]) for at, name in ((0, "low"), (2, "high"))}

    @staticmethod
    def joined(parts: Any) -> Any:
        return torch.cat([parts["low"], parts["high"]])

    def written(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {"dict": [[key, self.written(value)] for key, value in tree.items()]}
        if isinstance(tree, list | tuple):
            return {type(tree).__name__: [self.written(value) for value in tree]}
        if isinstance(tree, torch.Tensor):
            return {"data": tree.tolist()}
        if isinstance(tree, self.mapping.ShardedTensor):
            return {"leaf": ["tensor", tree.key, self.fields(tree)]}
        for kind, name in zip(KINDS[1:3], ("ShardedObject", "ShardedTensorFactory"), strict=True):
            if isinstance(tree, getattr(self.mapping, name)):
                return {"leaf": [kind, tree.key]}
        if isinstance(tree, self.mapping.LocalNonpersistentObject):
            return {"leaf": ["local", self.written(tree.unwrap())]}
        return tree

    @staticmethod
    def fields(tensor: Any) -> Any:
        names = ("local_shape", "global_shape", "global_offset", "axis_fragmentations", "prepend_axis_num")
        part = tensor.flattened_range
        data = None if tensor.data is None else tensor.data.tolist()
        found = {name: getattr(tensor, name) for name in names}
        return {
            **{name: list(one) if isinstance(one, tuple) else one for name, one in found.items()},
            "range": None if part is None else [part.start, part.stop],
            "data": data,
            "dtype": str(tensor.dtype),
        }

    # ---- dict_utils

    def extract(self, tree: Any, as_dicts: bool) -> Any:
        even = lambda leaf: isinstance(leaf, int) and leaf % 2 == 0  # noqa: E731
        return [self.written(one) for one in self.dict_utils.extract_matching_values(self.read(tree), even, as_dicts)]

    def maps(self, tree: Any) -> Any:
        in_place, mapped, with_key = self.read(tree), self.read(tree), self.read(tree)
        outplace = self.dict_utils.dict_list_map_outplace(lambda leaf: [leaf], in_place)
        self.dict_utils.dict_list_map_inplace(lambda leaf: (leaf,), in_place)
        self.dict_utils.dict_map(lambda leaf: [leaf], mapped)
        self.dict_utils.dict_map_with_key(lambda key, leaf: [key, leaf], with_key)
        return [self.written(one) for one in (outplace, in_place, mapped, with_key)]

    def walks(self, tree: Any) -> Any:
        values = list(self.dict_utils.nested_values(self.read(tree)))
        items = [[key, value] for _, key, value in self.dict_utils.nested_items_iter(self.read(tree))]
        return [self.written(values), self.written(items)]

    def merge(self, left: Any, right: Any) -> Any:
        return self.written(self.dict_utils.merge(self.read(left), self.read(right)))

    def diff(self, left: Any, right: Any) -> Any:
        found = self.dict_utils.diff(self.read(left), self.read(right))
        return [sorted(map(repr, one)) for one in found]

    def map_reduce(self, values: list[int]) -> Any:
        return self.written(self.dict_utils.map_reduce(values, lambda one: one % 3, lambda one: one + 1, sum))

    # ---- prefixes

    def prefixes(self, tree: Any, prefix: str, mapping: dict[str, str]) -> Any:
        added, replaced, mapped = self.read(tree), self.read(tree), self.read(tree)
        self.utils.add_prefix_for_sharding(added, prefix)
        self.utils.apply_prefix_mapping(mapped, mapping)
        found = [self.written(added), self.written(mapped)]
        found += [[self.written(one) for one in getattr(self.utils, name)(self.read(tree))] for name in EXTRACTS]
        try:
            self.utils.replace_prefix_for_sharding(replaced, "a", prefix)
            found.append(self.written(replaced))
        except ValueError:
            found.append("ValueError")
        return found

    # ---- mapping

    def from_rank_offsets(self, shape: list[int], offsets: list[list[int]], prepended: int) -> Any:
        data = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        part = self.mapping.ShardedTensor.from_rank_offsets("k", data, *map(tuple, offsets), prepend_axis_num=prepended)
        index = [one if isinstance(one, int) else [one.start, one.stop] for one in part.global_slice()]
        return [self.fields(part), index, self.optional(part, "max_allowed_chunks"), self.chunk_of(part)]

    def flat(self, shape: list[int], offsets: list[list[int]], start: int, stop: int, narrow: list[int]) -> Any:
        part = self.mapping.ShardedTensor.from_rank_offsets_flat(
            "k", torch.arange(float(start), float(stop)), tuple(shape), *map(tuple, offsets),
            flattened_range=slice(start, stop),
        )  # fmt: skip
        return [self.fields(part), [self.fields(one) for one in part.narrow(0, *narrow)]]

    def narrow(self, shape: list[int], offsets: list[list[int]], prepended: int, narrow: list[int]) -> Any:
        data = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        part = self.mapping.ShardedTensor.from_rank_offsets("k", data, *map(tuple, offsets), prepend_axis_num=prepended)
        return [self.fields(one) for one in part.narrow(*narrow)]

    @staticmethod
    def optional(part: Any, name: str) -> Any:
        try:
            return list(getattr(part, name)())
        except Exception:  # noqa: BLE001  not defined for this part
            return None

    def chunk_of(self, part: Any) -> Any:
        return None if 0 in part.local_shape else self.optional(part, "local_chunk_offset_in_global")

    def tensor(self, fields: dict[str, Any]) -> Any:
        return self.fields(self.mapping.ShardedTensor("k", None, torch.float32, **{
            name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()
        }))  # fmt: skip

    def unique_key(self, key: str, shape: list[int], offset: list[int]) -> Any:
        name = self.mapping.ShardedObject(key, None, tuple(shape), tuple(offset)).unique_key
        return [name, dataclasses.asdict(self.mapping.ShardedObject.empty_from_unique_key(name))]

    def main_replica(self, replica_id: Any) -> Any:
        return self.mapping.is_main_replica(tuple(replica_id) if isinstance(replica_id, list) else replica_id)

    def factories(self, tree: Any) -> Any:
        state = self.read(tree)
        is_factory = lambda leaf: isinstance(leaf, self.mapping.ShardedTensorFactory)  # noqa: E731
        factories, _ = self.dict_utils.extract_matching_values(state, is_factory, return_lists_as_dicts=True)
        self.mapping.apply_factories(state)
        built = self.written(state)
        kind = self.mapping.ShardedTensor
        self.dict_utils.dict_list_map_inplace(lambda leaf: leaf.data if isinstance(leaf, kind) else leaf, state)
        return [built, self.written(self.mapping.apply_factory_merges(state, factories))]

    # ---- optimizer

    def optimizer_state(self, count: int, tracked: list[int], exclude: list[str]) -> Any:
        parameters = [torch.nn.Parameter(torch.arange(float(2 + number))) for number in range(count)]
        make = self.mapping.ShardedTensor.from_rank_offsets
        model = {"layers": [{"w": make(f"p{at}", one, (0, 1, 2))} for at, one in enumerate(parameters)]}
        found = self.optimizer.get_param_id_to_sharded_param_map(model, [parameters[at] for at in tracked])
        keys = {number: leaf.key for number, leaf in found.items()}
        state: dict[str, Any] = {
            "state": {
                number: {"step": torch.tensor(1.0), "exp_avg": parameters[at].detach() + 1}
                for number, at in enumerate(tracked)
            },
            "param_groups": [{"lr": 0.5, "params": list(range(len(tracked)))}],
        }
        self.optimizer.optim_state_to_sharding_state(state, found, tuple(exclude))
        return [self.written(keys), self.written(state)]

    # ---- validation, distribution

    def strict(self, value: str) -> Any:
        flag = self.validation.parse_strict_flag(value)
        return [flag.name] + [
            getattr(self.validation.StrictHandling, name)(flag)
            for name in (
                "requires_explicit_ckpt_mismatch_check",
                "requires_global_app_metadata",
                "requires_returning_mismatch_keys",
            )
        ]

    def is_sharding_valid(self, ranks: list[list[list[Any]]]) -> bool:
        """Parts of the tensor "w" and of the array of objects "o", as (kind, position, fragments, replica)."""
        leaves = [
            [
                self.mapping.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, at, of), replica_id=replica)
                if kind == "tensor"
                else self.mapping.ShardedObject("o", None, (of,), (at,), replica)
                for kind, at, of, replica in rank
            ]
            for rank in ranks
        ]
        try:
            self.validation.validate_sharding_integrity(leaves)
        except Exception:  # noqa: BLE001  refused; the types of errors differ
            return False
        return True

    def distribution(self, parts: list[list[Any]], ranks: int) -> Any:
        holders, sizes = {name: one for name, one, _ in parts}, {name: size for name, _, size in parts}
        more: list[set[str]] = [set()] if "cross_parallelization_group_loads" in _parameters(self.exchange) else []
        return self.exchange.distribute_shards_to_ranks(holders, sizes, ranks, *more)

    # ---- names, strategies

    def names(self) -> dict[str, list[str]]:
        """Return the public classes and functions of each module."""
        root = import_module(self.package)
        modules = {one.name: import_module(one.name) for one in walk_packages(root.__path__, f"{self.package}.")}
        return {
            name.removeprefix(f"{self.package}."): sorted(
                key
                for key, value in vars(module).items()
                if not key.startswith("_") and getattr(value, "__module__", "") == name and callable(value)
            )
            for name, module in modules.items()
        }

    def has(self, module: str, name: str) -> bool:
        return hasattr(import_module(f"{self.package}.{module}"), name)

    def by_dcp(self, folder: str, action: str, count: int) -> Any:
        """Save a tensor of 12 elements in ``count`` parts, or load it into such, with DCP."""
        kinds = import_module(f"{self.package}.strategies.checkpointable")
        values = torch.arange(12.0) if action == "save" else torch.zeros(12)
        cut = [
            self.mapping.ShardedTensor.from_rank_offsets("w", one, (0, at, count))
            for at, one in enumerate(values.chunk(count))
        ]
        made = [kinds.CheckpointableShardedTensor.from_sh_ten(one) for one in cut]
        state = {"w": made[0] if count == 1 else kinds.LocalShardsContainer(made)}
        getattr(torch.distributed.checkpoint, action)(state, checkpoint_id=folder)
        return [list(state["w"].shape), torch.cat([one.data for one in cut]).tolist()]

    def own_strategies(self, folder: str, strict: str, requested: list[str], version: int) -> Any:
        """Save and load with strategies of a script. Return how they were called, and the outcome."""
        calls, checks = list[Any](), set[str]()
        base: Any = self.base
        du, part = self.dict_utils, self.mapping.ShardedTensor.from_rank_offsets

        class Save(base.SaveShardedStrategy):  # type: ignore[misc]
            def save(self, state: Any, directory: Any) -> None:
                calls.append(["save", sorted(state), str(directory)])
                torch.save({one.key: one.data for one in du.nested_values(state)}, Path(directory, "own.pt"))

        class Load(base.LoadShardedStrategy):  # type: ignore[misc]
            def load(self, state: Any, directory: Any) -> Any:
                calls.append(["load", sorted(state), str(directory)])
                found = torch.load(Path(directory, "own.pt"))
                return du.dict_list_map_outplace(lambda one: found[one.key], state)

            def load_tensors_metadata(self, directory: Any) -> Any:
                calls.append(["load_tensors_metadata", str(directory)])
                found = torch.load(Path(directory, "own.pt"))
                return {key: part(key, one).without_data() for key, one in found.items()}

            def check_backend_compatibility(self, loaded_version: str) -> None:
                checks.add(f"backend {loaded_version}")  # Megatron Core calls it several times

            def check_version_compatibility(self, loaded_version: int) -> None:
                checks.add(f"version {loaded_version}")

        def state(names: list[str], fill: float) -> dict[str, Any]:
            tensors = {name: part(f"key.{name}", torch.full((2,), fill)) for name in names}
            return {"model": {**tensors, "o": self.mapping.ShardedObject("o", {"fill": fill}, (1,), (0,))}, "step": 3}

        for action, strategy in (("SAVE_SHARDED", Save("own", version)), ("LOAD_SHARDED", Load())):
            base.register_default_strategy(base.StrategyAction[action], "own", version, strategy)
        Path(folder).mkdir(parents=True)
        self.root.save(state(["a", "b"], 1.0), folder, ("own", version))
        found: Any
        try:
            found = self.root.load(state(requested, 0.0), folder, strict=strict)
        except Exception as error:  # noqa: BLE001  its words are compared
            text = str(error)
            names = [name for name in ("key.a", "key.b", "key.c") if name in text]
            return [calls, sorted(checks), names, ["Unexpected keys" in text, "Missing keys" in text]]
        state_dict, *keys = found if isinstance(found, tuple) else [found]
        values = {name: one.tolist() for name, one in state_dict["model"].items() if name != "o"}
        return [
            calls,
            sorted(checks),
            values,
            state_dict["model"]["o"],
            state_dict["step"],
            [sorted(one) for one in keys],
        ]


def _parameters(exchange: Any) -> Any:
    return exchange.distribute_shards_to_ranks.__code__.co_varnames


def main() -> None:
    """Answer the calls of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    calls = Calls(sys.argv[1])
    for line in sys.stdin:
        answers.write(json.dumps(calls.answer(*json.loads(line)), default=int) + "\n")  # int: of numpy
        answers.flush()


if __name__ == "__main__":
    main()
