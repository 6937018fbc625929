"""Saves and loads whose work is spread over the ranks that hold the same data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from keepstep.state.values.leaves import TORCH_DTYPES
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import dict_list_map_outplace, nested_values
from keepstep_megatron.distribution import (
    ShardId,
    distribute_shards_to_ranks,
    saving_ranks,
    shard_id,
    with_saving_ranks,
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


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Saves each part on the rank that has the least to write so far, of those that hold it.

    Args:
        strategy: saves.
        parallelization_group: ranks that share their work. Default: all.
        do_cache_distribution: assign the parts once, and keep the assignment for later saves. The state must have the
            same structure then.
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
        self._group = parallelization_group
        self._keeps = do_cache_distribution
        self._ranks: dict[ShardId, int] | None = None

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
        self.base_strategy.save(self._distributed(sharded_state_dict), checkpoint_dir)

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> AsyncRequest:
        """See ``AsyncSaveShardedStrategy``."""
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(f"{self.base_strategy} cannot save in the background")
        return self.base_strategy.async_save(self._distributed(sharded_state_dict), checkpoint_dir)

    def _distributed(self, sharded_state_dict: ShardedStateDict) -> Any:
        """Return the state with a main replica on the rank that saves it."""
        if self._ranks is None or not self._keeps:
            self._ranks = saving_ranks(_exchanged(nested_values(sharded_state_dict), self._group, self.timeout))
        rank = dist.get_rank(self._group) if dist.is_initialized() else 0
        return with_saving_ranks(sharded_state_dict, self._ranks, rank)


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Reads each part on one of the ranks that want it, which sends it to the others.

    Args:
        strategy: loads.
        parallelization_group: ranks that share their work. Default: all.
        do_cache_distribution: assign the parts once, and keep the assignment for later loads.
        exchange_algo: ``"broadcast"``: the rank that has read a part sends it to all ranks of the group.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: dist.ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        if exchange_algo != "broadcast":
            raise CheckpointingException(f"invalid exchange_algo {exchange_algo!r}: expected 'broadcast'")
        self.base_strategy = strategy
        self.timeout = strategy.timeout
        self._group = parallelization_group
        self._keeps = do_cache_distribution
        self._assigned: dict[ShardId, int] | None = None

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

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> StateDict:
        """See ``LoadShardedStrategy``. Objects are read by every rank that wants them."""
        ranks = Ranks(f"{checkpoint_dir} was not loaded", self.timeout, group=self._group)
        if ranks.size == 1:
            return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        leaves = list(nested_values(sharded_state_dict))
        parts = [shard_id(leaf) if isinstance(leaf, ShardedTensor) else None for leaf in leaves]
        wanted = _exchanged(leaves, self._group, self.timeout)
        _check_complex(wanted)
        if self._assigned is None or not self._keeps:
            self._assigned = _readers(wanted)
        assigned = self._assigned
        mine = {
            number: leaf
            for number, (leaf, part) in enumerate(zip(leaves, parts, strict=True))
            if part is None or assigned[part] == ranks.rank
        }
        loaded: dict[int, Any] = {}
        ranks.stage(lambda: loaded.update(self.base_strategy.load(dict(mine), checkpoint_dir)))  # type: ignore[arg-type]
        sent = {
            shard_id(one): one
            for reader, of_rank in enumerate(wanted)
            for one in of_rank
            if assigned[shard_id(one)] == reader
        }
        for part in sorted(_shared(wanted)):
            own = [number for number, one in enumerate(parts) if one == part]
            source = loaded[own[0]] if own and assigned[part] == ranks.rank else None
            received = ranks.broadcast(source, assigned[part], sent[part].data_shape, sent[part].dtype)
            for number in own:
                loaded.setdefault(number, _put(received, leaves[number]))
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        state: StateDict = dict_list_map_outplace(lambda leaf: loaded[numbers[id(leaf)]], sharded_state_dict)
        return state


def _put(received: torch.Tensor, leaf: ShardedTensor) -> torch.Tensor:
    """Return the memory of ``leaf`` with the values received, or new memory if it has none."""
    received = received.view(leaf.data_shape)  # without the prepended axes
    if leaf.data is None:
        return received.to(leaf.dtype)
    with torch.no_grad():
        return leaf.data.detach().copy_(received)


def _exchanged(leaves: Iterable[Any], group: dist.ProcessGroup | None, timeout: timedelta) -> list[list[ShardedTensor]]:
    """Return the tensors of each rank of the group, without data."""
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


def _readers(wanted: Sequence[Sequence[ShardedTensor]]) -> dict[ShardId, int]:
    """Return the rank that reads each part."""
    holders: dict[ShardId, set[int]] = {}
    sizes: dict[ShardId, int] = {}
    for rank, tensors in enumerate(wanted):
        for tensor in tensors:
            holders.setdefault(shard_id(tensor), set()).add(rank)
            sizes[shard_id(tensor)] = tensor.nbytes
    return distribute_shards_to_ranks(holders, sizes, len(wanted))


def _shared(wanted: Sequence[Sequence[ShardedTensor]]) -> set[ShardId]:
    """Return the parts that several ranks want."""
    found = [shard_id(tensor) for tensors in wanted for tensor in {shard_id(one): one for one in tensors}.values()]
    return {part for part, ranks in Counter(found).items() if ranks > 1}
