"""A sharded state in the memory of this rank: a local checkpoint, which other ranks can hold copies of.

The names are those of Megatron Core's ``dist_checkpointing.tensor_aware_state_dict``. The managers and replication
strategies of nvidia-resiliency-ext store and send such states; it need not be installed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import sub
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import dict_list_map_outplace, nested_values
from keepstep_megatron.distribution import ShardDistribution, ShardId, distribution_of, shard_id
from keepstep_megatron.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from keepstep_megatron.pieces import pieces_of
from keepstep_megatron.sharded_load import load_from
from keepstep_megatron.stages import TIMEOUT, Ranks, StageFailed
from keepstep_megatron.state_parts import SavedParts, parts_to_save
from keepstep_megatron.strategies.chosen import LoadStrategies
from keepstep_megatron.strategies.fully_parallel import FullyParallelLoadStrategyWrapper, exchanged
from keepstep_megatron.strategies.interfaces import CheckpointDir, LoadCommonStrategy
from keepstep_megatron.strategies.stored_state import Destination, StoredLoadStrategy, StoredTensorFacts
from keepstep_megatron.validation import StrictHandling, check_integrity, pack_rows, row_of, unpack_rows
from keepstep_mesh.protocol.boxes import Box, uncovered

ALGOS = ("atomic", "fully_parallel")
PLACE = "the local checkpoint"
"""Its name in errors."""


class LocalLoadFailed(StageFailed, AssertionError):
    """A local checkpoint was not loaded. As with Megatron Core, an ``AssertionError`` says so."""


@dataclass
class MCoreTensorAwareStateDict:
    """A sharded state in memory, whose tensors can be removed and put back in. ``from_state_dict`` makes one.

    It can be pickled, with its tensors or *hollow*, without them. Each rank holds its own parts; the state of a rank is
    loaded by a rank with the same parts.

    Attributes:
        common: values without sharding.
        sharded_state_dict: leaves of type ``ShardedTensor`` and ``ShardedObject``; ``data`` of a tensor is None if it
            was removed, or if another rank holds it.
    """

    common: StateDict
    sharded_state_dict: ShardedStateDict
    _is_hollow: bool = False
    _devices: dict[int, str] = field(default_factory=dict, repr=False)
    """Original types of devices, by the position of the tensor: of all tensors of a hollow state, and of those that
    are on another device."""

    def __post_init__(self) -> None:
        _register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        _register()
        self.__dict__.update(state)

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: ShardedStateDict,
        algo: str = "fully_parallel",
        parallelization_group: dist.ProcessGroup | None = None,
        cached_metadata: ShardDistribution | tuple[Any, ...] | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution | tuple[Any, ...] | None]:
        """Make a local checkpoint of a state. Every rank calls it.

        The tensors are not copied yet: call ``copy_tensors_to_cpu`` before training changes them.

        Args:
            sharded_state_dict: nested dicts and lists; not changed.
            algo: ``"fully_parallel"``: of the ranks of the group that hold a part, one keeps it. ``"atomic"``: every
                rank keeps all that it has.
            parallelization_group: ranks that share the parts. Default: all.
            cached_metadata: the second value that an earlier call returned, for a state with the same parts: the ranks
                are not asked again, and the sharding is not validated.

        Returns:
            The state, and the value for ``cached_metadata``.

        Raises:
            NotImplementedError: ``algo`` has another value.
            CheckpointingException: the state is invalid, or a rank failed or was lost.
        """
        _check_algo(algo)
        parts = _validated(sharded_state_dict) if cached_metadata is None else parts_to_save(sharded_state_dict)
        if algo == "atomic":
            return cls(parts.common, parts.sharded), (None,) * len(ShardDistribution._fields)
        leaves = [leaf for leaf in nested_values(parts.sharded) if isinstance(leaf, ShardedTensor)]
        distribution = cached_metadata
        if not isinstance(distribution, ShardDistribution):
            distribution = distribution_of(exchanged(leaves, parallelization_group, TIMEOUT), ignore_groups=True)
        rank = dist.get_rank(parallelization_group) if dist.is_initialized() else 0
        for leaf in leaves:
            keeper = distribution.main_rank_for_shard.get(shard_id(leaf))
            if keeper is None:
                raise CheckpointingException(
                    f"{leaf.key!r} has a part at {leaf.global_offset} that the state of cached_metadata did not have: "
                    f"pass cached_metadata=None"
                )
            if keeper != rank:
                leaf.data = None
        return cls(parts.common, parts.sharded), distribution

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors were removed, and not put back in yet."""
        return self._is_hollow

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that this rank holds, in the order of the state.

        Raises:
            CheckpointingException: the state is hollow.
        """
        self._expect(hollow=False, action="read its tensors")
        return (leaf.data for _, leaf in self._held() if leaf.data is not None)

    @property
    def common_state_dict(self) -> StateDict:
        """The values without sharding."""
        return self.common

    def values(self) -> tuple[StateDict, ShardedStateDict]:
        """Return the values without sharding, and the sharded leaves."""
        return self.common, self.sharded_state_dict

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out, and return them. The state is hollow then.

        Raises:
            CheckpointingException: it is hollow already.
        """
        self._expect(hollow=False, action="take its tensors out")
        taken = []
        for number, leaf in self._held():
            assert leaf.data is not None
            self._devices.setdefault(number, leaf.data.device.type)
            taken.append(leaf.data)
            leaf.data = None
        self._is_hollow = True
        return taken

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in.

        Args:
            tensor_data: as many as ``pop_tensors`` returned, in the same order; on any device.

        Raises:
            CheckpointingException: the state is not hollow, or a tensor does not fit. It is hollow still.
        """
        self._expect(hollow=True, action="put tensors in")
        held, given = list(self._held()), list(tensor_data)
        if len(held) != len(given):
            raise CheckpointingException(f"{len(given)} tensors were given to a state of {len(held)}: expected as many")
        for (_, leaf), tensor in zip(held, given, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (leaf.data_shape, leaf.dtype):
                raise CheckpointingException(
                    f"{leaf.key!r} has shape {leaf.data_shape} and dtype {leaf.dtype}, but a tensor of shape "
                    f"{tuple(tensor.shape)} and dtype {tensor.dtype} was given: keep the order of pop_tensors"
                )
        for (number, leaf), tensor in zip(held, given, strict=True):
            leaf.data = tensor
            if self._devices[number] == tensor.device.type:
                del self._devices[number]
        self._is_hollow = False

    def init_tensors(self) -> None:
        """Put new tensors in, on the original devices and without values.

        Raises:
            CheckpointingException: the state is not hollow.
        """
        self._expect(hollow=True, action="make new tensors")
        for number, leaf in self._held():
            leaf.init_data(self._devices.pop(number))
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies in memory of the CPU. The original ones are not changed.

        Args:
            non_blocking: return before copies from an accelerator are complete: synchronize before the copies are read.

        Raises:
            CheckpointingException: the state is hollow.
        """
        self._expect(hollow=False, action="copy its tensors")
        for number, leaf in self._held():
            assert leaf.data is not None
            kind = leaf.data.device.type
            if kind != "cpu":
                self._devices.setdefault(number, kind)
                leaf.data = leaf.data.to("cpu", non_blocking=non_blocking)
            elif number not in self._devices:  # those that have another device are copies
                leaf.data = leaf.data.clone()

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors to their original devices.

        Args:
            non_blocking: return before the copies are complete.

        Raises:
            CheckpointingException: the state is hollow.
        """
        self._expect(hollow=False, action="move its tensors")
        for number, leaf in self._held():
            if number in self._devices:
                assert leaf.data is not None
                leaf.data = leaf.data.to(self._devices.pop(number), non_blocking=non_blocking)

    def to_state_dict(
        self,
        sharded_state_dict: ShardedStateDict,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        parallelization_group: dist.ProcessGroup | None = None,
        strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
    ) -> StateDict | tuple[StateDict, set[str], set[str]]:
        """Load the state. Every rank calls it. ``keepstep.sharded.load`` describes what happens to the request.

        Args:
            sharded_state_dict: the request, with the parts that were saved. If it is empty, only the values without
                sharding are returned, and the ranks do not speak to each other.
            algo: that of ``from_state_dict``. With ``"fully_parallel"``, ranks send their parts to each other.
            exchange_algo: see ``FullyParallelLoadStrategyWrapper``.
            validate_access_integrity: check that the ranks request each element of each value as main replica exactly
                once.
            parallelization_group: that of ``from_state_dict``.
            strict: what to do about keys that only the local checkpoint has. A key that only the request has is an
                error, whatever ``strict`` says.
            return_mismatch_keys: return missing and unexpected keys too.

        Returns:
            The state; with ``return_mismatch_keys``: the state, missing keys, and an empty set.

        Raises:
            NotImplementedError: ``algo`` has another value.
            CheckpointingException: the state is hollow, a key or a part is missing, or a rank failed or was lost.
        """
        _check_algo(algo)
        self._expect(hollow=False, action="load it")
        if not sharded_state_dict:
            state: StateDict = dict_list_map_outplace(lambda leaf: leaf, self.common)
            return (state, set(), set()) if return_mismatch_keys else state
        local = _LocalLoad(self)
        spread = _HeldLoad(local, parallelization_group, exchange_algo=exchange_algo)
        strategies = LoadStrategies(spread if algo == "fully_parallel" else local, local)
        validate = validate_access_integrity
        try:
            found = load_from(lambda: strategies, sharded_state_dict, PLACE, validate, strict, TIMEOUT, is_local=True)
        except StageFailed as error:
            raise LocalLoadFailed(*error.args) from error
        return found if return_mismatch_keys else found[0]

    def _held(self) -> Iterator[tuple[int, ShardedTensor]]:
        """Yield the position and the leaf of each tensor that is held, or was removed."""
        for number, leaf in enumerate(nested_values(self.sharded_state_dict)):
            if isinstance(leaf, ShardedTensor) and (number in self._devices or leaf.data is not None):
                yield number, leaf

    def _expect(self, *, hollow: bool, action: str) -> None:
        if self._is_hollow is not hollow:
            problem = "has its tensors" if hollow else "is hollow"
            raise CheckpointingException(
                f"cannot {action}: the state {problem}; call {'pop_tensors' if hollow else 'insert_tensors'} first"
            )


def _register() -> None:
    """Make ``isinstance`` true for the base class of nvidia-resiliency-ext, if the process has imported it."""
    module = sys.modules.get("nvidia_resiliency_ext.checkpointing.local.base_state_dict")
    if module is not None:
        module.TensorAwareStateDict.register(MCoreTensorAwareStateDict)


def _check_algo(algo: str) -> None:
    if algo not in ALGOS:
        raise NotImplementedError(f"invalid algo {algo!r}: expected one of {', '.join(ALGOS)}")


def _validated(sharded_state_dict: ShardedStateDict) -> SavedParts:
    """Return the parts of a state, after all ranks have compared their sharding."""
    found: list[SavedParts] = []

    def prepare() -> bytes:
        found.append(parts_to_save(sharded_state_dict))
        return pack_rows(row_of(leaf) for leaf in nested_values(found[0].sharded))

    rows = Ranks(f"{PLACE} was not made").stage(prepare)
    check_integrity([unpack_rows(one) for one in rows])
    return found[0]


class _LocalLoad(StoredLoadStrategy, LoadCommonStrategy):
    """Loads what this rank holds."""

    def __init__(self, local: MCoreTensorAwareStateDict) -> None:
        self.stored = _LocalState(local)

    @contextmanager
    def open(self, checkpoint_dir: CheckpointDir) -> Iterator[_LocalState]:  # noqa: ARG002  the only place
        """See ``StoredLoadStrategy``."""
        yield self.stored

    def load_common(self, checkpoint_dir: CheckpointDir) -> StateDict:  # noqa: ARG002  the only place
        """See ``LoadCommonStrategy``."""
        return self.stored.common()


class _LocalState:
    """See ``StoredState``."""

    def __init__(self, local: MCoreTensorAwareStateDict) -> None:
        self._local = local
        self._leaves = list(nested_values(local.sharded_state_dict))

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensorFacts]:
        """See ``StoredState``. Also those that other ranks hold."""
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, ShardedTensor)]
        return {leaf.key: StoredTensorFacts(leaf.dtype, leaf.global_shape) for leaf in tensors}

    @property
    def objects(self) -> tuple[str, ...]:
        """See ``StoredState``."""
        return tuple(self._values)

    @cached_property
    def _values(self) -> dict[str, Any]:
        return {leaf.unique_key: leaf.data for leaf in self._leaves if isinstance(leaf, ShardedObject)}

    @cached_property
    def _pieces(self) -> Mapping[str, list[tuple[Box, torch.Tensor]]]:
        found: defaultdict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        for _, leaf in self._local._held():  # noqa: SLF001  of this module
            found[leaf.key] += pieces_of(leaf)
        return found

    def parts(self) -> list[ShardId]:
        """Return the parts that this rank holds."""
        return [shard_id(leaf) for _, leaf in self._local._held()]  # noqa: SLF001  of this module

    def common(self) -> StateDict:
        """Return the values without sharding, in new dicts and lists."""
        state: StateDict = dict_list_map_outplace(lambda leaf: leaf, self._local.common)
        return state

    def read(self, destinations: list[Destination]) -> None:
        """See ``StoredState``."""
        with torch.no_grad():
            for one in destinations:
                found: list[Box] = []
                for box, memory in self._pieces.get(one.key, ()):
                    overlap = box.overlap(one.box)
                    if overlap is not None and overlap not in found:
                        one.memory[overlap.within(one.box)].copy_(memory[overlap.within(box)])
                        found.append(overlap)
                inside = [Box(tuple(map(sub, part.offset, one.box.offset)), part.shape) for part in found]
                if problem := uncovered(one.box.shape, inside):
                    raise CheckpointingException(
                        f"this rank does not hold all of {one.box} of {one.key!r}: {problem}; a local checkpoint is "
                        f"loaded with the sharding and the algo that it was made with"
                    )

    def value(self, unique_key: str) -> Any:
        """See ``StoredState``."""
        return self._values[unique_key]


class _HeldLoad(FullyParallelLoadStrategyWrapper):
    """Reads each part on one of the ranks that hold it."""

    def _assign(self, wanted: Sequence[Sequence[ShardedTensor]], ranks: Ranks) -> ShardDistribution:
        assert isinstance(self.base_strategy, _LocalLoad)
        stored = ranks.gather(msgpack.packb(self.base_strategy.stored.parts()))
        held = [{(key, *places) for key, *places in msgpack.unpackb(one, use_list=False)} for one in stored]
        found = distribution_of(wanted, ignore_groups=True, stored=held)
        for part in sorted(found.all_ranks_for_shard.keys() - found.main_rank_for_shard.keys()):
            raise CheckpointingException(
                f"no rank of the group holds the part of {part[0]!r} at {part[1]}: a local checkpoint is loaded with "
                f"the sharding that it was made with"
            )
        return found
