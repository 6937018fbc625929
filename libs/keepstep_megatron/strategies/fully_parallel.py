"""Saves and loads whose work is spread over the ranks that hold the same data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from keepstep.state.values.leaves import TORCH_DTYPES
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import dict_list_map_outplace, nested_values
from keepstep_megatron.distribution import (
    ShardDistribution,
    ShardId,
    distribution_of,
    rounds_of,
    set_saving_ranks,
    shard_id,
)
from keepstep_megatron.mapping import ShardedStateDict, ShardedTensor, StateDict
from keepstep_megatron.stages import Ranks
from keepstep_megatron.strategies.async_requests import AsyncRequest
from keepstep_megatron.strategies.interfaces import (
    AsyncSaveShardedStrategy,
    CheckpointDir,
    LoadShardedStrategy,
    SaveShardedStrategy,
    ShardedMetadata,
)
from keepstep_megatron.validation import ShardRow, pack_rows, row_of, unpack_rows

EXCHANGE_ALGOS = ("broadcast", "gather_rounds", "gather_object")
ROUND_BYTES = 64 << 20
"""Limit of several parts that a rank sends in a round of ``gather_object``. Each rank receives those of all."""
ALIGNED = 16
"""Bytes of an element of the largest dtype: parts begin at multiples of it."""


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Saves each part on the rank that has the least to write so far, of those that hold it.

    Args:
        strategy: saves.
        parallelization_group: ranks that share their work. Default: all.
        do_cache_distribution: assign the parts once, and keep the assignment for later saves, which then do not
            exchange the parts of all ranks. The state must have the same parts then.

    Attributes:
        cached_distribution: the assignment that is kept.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: dist.ProcessGroup | None = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self.timeout = strategy.timeout
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.cached_distribution: ShardDistribution | None = None
        self._cached_parts = frozenset[ShardId]()

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether ``strategy`` does."""
        return self.base_strategy.can_handle_sharded_objects

    @property
    def can_handle_common_state(self) -> bool:
        """Whether ``strategy`` does."""
        return self.base_strategy.can_handle_common_state

    def prepare(self, checkpoint_dir: CheckpointDir) -> None:
        """See ``SaveShardedStrategy``."""
        self.base_strategy.prepare(checkpoint_dir)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> None:
        """See ``SaveShardedStrategy``."""
        self.apply_saving_parallelization(sharded_state_dict)
        self.base_strategy.save(sharded_state_dict, checkpoint_dir)

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> AsyncRequest:
        """See ``AsyncSaveShardedStrategy``."""
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(f"{self.base_strategy} cannot save in the background")
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir)

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Make each part a main replica on the rank that saves it, in place. Every rank of the group calls it.

        Args:
            sharded_state_dict: nested dicts and lists of sharded leaves; their ``replica_id`` is changed.

        Raises:
            CheckpointingException: an assignment was kept, and the state has other parts now; or a rank was lost.
        """
        leaves = list(nested_values(sharded_state_dict))
        parts = _parts_of(leaves)
        if self.cached_distribution is not None and self.do_cache_distribution:
            _check_same(parts, self._cached_parts, "saved")
            distribution = self.cached_distribution
        else:
            distribution = distribution_of(exchanged(leaves, self.parallelization_group, self.timeout))
        if self.do_cache_distribution:
            self.cached_distribution, self._cached_parts = distribution, parts
        rank = dist.get_rank(self.parallelization_group) if dist.is_initialized() else 0
        set_saving_ranks(sharded_state_dict, distribution, rank)


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Reads each part on one of the ranks that want it, which sends it to the others.

    Args:
        strategy: loads.
        parallelization_group: ranks that share their work. Default: all.
        do_cache_distribution: assign the parts once, and keep the assignment for later loads, which then do not
            exchange the parts of all ranks. The state must have the same parts then.
        exchange_algo: how the ranks of the group exchange what they have read. ``"broadcast"``: the rank that has read
            a part sends it to all, part after part. ``"gather_rounds"``: in each round, every rank sends one of its
            parts to all; faster than ``"broadcast"`` for many parts of similar size. ``"gather_object"``: the same, but
            a rank sends up to 64 MiB of small parts in a round.

    Attributes:
        cached_distribution: the assignment that is kept.

    Raises:
        CheckpointingException: ``exchange_algo`` has another value.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: dist.ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        if exchange_algo not in EXCHANGE_ALGOS:
            expected = ", ".join(EXCHANGE_ALGOS)
            raise CheckpointingException(f"invalid exchange_algo {exchange_algo!r}: expected one of {expected}")
        self.base_strategy = strategy
        self.timeout = strategy.timeout
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.cached_distribution: ShardDistribution | None = None
        self._cached_parts = frozenset[ShardId]()

    @property
    def cached_global_metadata(self) -> Any:
        """That of ``strategy``. None: it has none."""
        return getattr(self.base_strategy, "cached_global_metadata", None)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether ``strategy`` does."""
        return self.base_strategy.can_handle_sharded_objects

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """See ``LoadStrategyBase``."""
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """See ``LoadStrategyBase``."""
        self.base_strategy.check_version_compatibility(loaded_version)

    def load_tensors_metadata(self, checkpoint_dir: CheckpointDir) -> ShardedMetadata:
        """See ``LoadShardedStrategy``."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: CheckpointDir) -> ShardedMetadata:
        """See ``LoadShardedStrategy``."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: CheckpointDir, key_prefix: str) -> None:
        """See ``LoadShardedStrategy``."""
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> StateDict:
        """See ``LoadShardedStrategy``. Objects are read by every rank that wants them."""
        ranks = Ranks(f"{checkpoint_dir} was not loaded", self.timeout, group=self.parallelization_group)
        if ranks.size == 1:
            return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        leaves = list(nested_values(sharded_state_dict))
        distribution = self._distribution(leaves, ranks)
        assigned = distribution.main_rank_for_shard
        parts = [shard_id(leaf) if isinstance(leaf, ShardedTensor) else None for leaf in leaves]
        mine: StateDict = {
            str(number): leaf if part is None else replace(leaf, replica_id=0)  # some strategies load only those
            for number, (leaf, part) in enumerate(zip(leaves, parts, strict=True))
            if part is None or assigned[part] == ranks.rank
        }
        found: StateDict = {}
        ranks.stage(lambda: found.update(self.base_strategy.load(mine, checkpoint_dir)))
        loaded = {int(number): value for number, value in found.items()}
        read = {part: loaded[number] for number, part in enumerate(parts) if part is not None and number in loaded}
        waiting: defaultdict[ShardId, list[int]] = defaultdict(list)
        for number, part in enumerate(parts):
            if part is not None and number not in loaded:
                waiting[part].append(number)
        for part, received in _EXCHANGES[self.exchange_algo](ranks, distribution, read):
            loaded |= {number: _put(received, leaves[number]) for number in waiting[part]}
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        state: StateDict = dict_list_map_outplace(lambda leaf: loaded[numbers[id(leaf)]], sharded_state_dict)
        return state

    def _distribution(self, leaves: Sequence[Any], ranks: Ranks) -> ShardDistribution:
        """Return the ranks that read the parts. Every rank has the same."""
        parts = _parts_of(leaves)
        if self.cached_distribution is not None and self.do_cache_distribution:
            _check_same(parts, self._cached_parts, "loaded")
            return self.cached_distribution
        distribution = self._assign(exchanged(leaves, self.parallelization_group, self.timeout), ranks)
        if self.do_cache_distribution:
            self.cached_distribution, self._cached_parts = distribution, parts
        return distribution

    def _assign(self, wanted: Sequence[Sequence[ShardedTensor]], ranks: Ranks) -> ShardDistribution:  # noqa: ARG002
        """Return the ranks that read the parts.

        Args:
            wanted: tensors of each rank, without data.
            ranks: those of the group, for a subclass that needs more to know.
        """
        _check_complex(wanted)
        return distribution_of(wanted, ignore_groups=True)


def _parts_of(leaves: Iterable[Any]) -> frozenset[ShardId]:
    return frozenset(shard_id(leaf) for leaf in leaves if isinstance(leaf, ShardedTensor))


def _check_same(parts: frozenset[ShardId], cached: frozenset[ShardId], done: str) -> None:
    """Raise if an assignment was made for other parts: no rank, or several, would have the difference."""
    if different := sorted(parts ^ cached):
        raise CheckpointingException(
            f"the state has not the same parts as the first that was {done} ({different[0][0]!r} at "
            f"{different[0][1]}): with do_cache_distribution, its structure must not change; use another strategy "
            f"object for another structure"
        )


def _shared(distribution: ShardDistribution) -> list[ShardId]:
    """Return the parts that several ranks want, in the same order on all ranks."""
    return sorted(part for part, ranks in distribution.all_ranks_for_shard.items() if len(ranks) > 1)


def _by_broadcast(
    ranks: Ranks, distribution: ShardDistribution, read: Mapping[ShardId, torch.Tensor]
) -> Iterator[tuple[ShardId, torch.Tensor]]:
    """Yield the shared parts. One rank has read each of them, in ``read``."""
    for part in _shared(distribution):
        reader, facts = distribution.main_rank_for_shard[part], distribution.shard_to_metadata[part]
        source = read[part] if reader == ranks.rank else None
        yield part, ranks.broadcast(source, reader, facts.data_shape, facts.dtype)


def _by_rounds(
    ranks: Ranks, distribution: ShardDistribution, read: Mapping[ShardId, torch.Tensor], round_bytes: int = 0
) -> Iterator[tuple[ShardId, torch.Tensor]]:
    """See ``_by_broadcast``. Large parts come first, so that those of a round have similar sizes.

    Args:
        ranks: those of the group.
        distribution: the ranks that have read the parts.
        read: the parts of this rank.
        round_bytes: limit of what a rank sends in a round, if it sends several parts.
    """
    facts = distribution.shard_to_metadata
    of_ranks: list[list[ShardId]] = [[] for _ in range(ranks.size)]
    for part in sorted(_shared(distribution), key=lambda one: -facts[one].nbytes):
        of_ranks[distribution.main_rank_for_shard[part]].append(part)
    sizes = {part: -(-facts[part].nbytes // ALIGNED) * ALIGNED for parts in of_ranks for part in parts}
    for rounds in zip_longest(*(rounds_of(parts, sizes, round_bytes) for parts in of_ranks), fillvalue=()):
        length = max(sum(sizes[part] for part in parts) for parts in rounds)
        sent = torch.zeros(length, dtype=torch.uint8, device=ranks.device)
        for start, part in _placed(rounds[ranks.rank], sizes):
            sent[start : start + facts[part].nbytes] = _bytes_of(read[part])
        for parts, received in zip(rounds, ranks.all_gather(sent), strict=True):
            for start, part in _placed(parts, sizes):
                one = received[start : start + facts[part].nbytes]
                yield part, one.view(facts[part].dtype).view(facts[part].data_shape)


def _placed(parts: Iterable[ShardId], sizes: Mapping[ShardId, int]) -> Iterator[tuple[int, ShardId]]:
    """Yield each part of a round with the position of its first byte."""
    start = 0
    for part in parts:
        yield start, part
        start += sizes[part]


_Exchange: TypeAlias = Callable[
    [Ranks, ShardDistribution, Mapping[ShardId, torch.Tensor]], Iterator[tuple[ShardId, torch.Tensor]]
]
_EXCHANGES: Mapping[str, _Exchange] = {
    "broadcast": _by_broadcast,
    "gather_rounds": _by_rounds,
    "gather_object": partial(_by_rounds, round_bytes=ROUND_BYTES),
}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # groups do not send every dtype


def _put(received: torch.Tensor, leaf: ShardedTensor) -> torch.Tensor:
    """Return the memory of ``leaf`` with the values received, or new memory if it has none."""
    received = received.view(leaf.data_shape)  # without the prepended axes
    if leaf.data is None:
        is_view = received.untyped_storage().nbytes() != received.nbytes  # of all that was received in a round
        return received.to(leaf.dtype, copy=is_view)
    with torch.no_grad():
        return leaf.data.detach().copy_(received)


def exchanged(leaves: Iterable[Any], group: dist.ProcessGroup | None, timeout: timedelta) -> list[list[ShardedTensor]]:
    """Return the tensors of each rank of the group, without data. Every rank of the group calls it.

    Args:
        leaves: those of this rank.
        group: the ranks. Default: all.
        timeout: time limit.
    """
    rows = [row_of(leaf) for leaf in leaves if isinstance(leaf, ShardedTensor)]
    ranks = Ranks("parts were not assigned to ranks", timeout, group=group)
    return [[_tensor_of(row) for row in unpack_rows(one)] for one in ranks.gather(pack_rows(rows))]


def _tensor_of(row: ShardRow) -> ShardedTensor:
    part = None if row.start < 0 else slice(row.start, row.stop)
    fields = (row.key, None, TORCH_DTYPES[row.dtype], row.box, row.global_shape, row.offset, None)
    return ShardedTensor(*fields, replica_id=0 if row.is_main else 1, flattened_range=part)


def _check_complex(wanted: Sequence[Sequence[ShardedTensor]]) -> None:
    """Raise on every rank if some want a part as complex numbers and others as real ones: one rank reads it for all."""
    known: dict[ShardId, bool] = {}
    for tensors in wanted:
        for one in tensors:
            if known.setdefault(shard_id(one), one.dtype.is_complex) is not one.dtype.is_complex:
                raise CheckpointingException(
                    f"some ranks request {one.key!r} as complex numbers, others as real ones: request one dtype"
                )
