"""Carry out the plan of a recovery: bring the shard of this rank to the target."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from keepstep.one_copy.copies.copy_server import CopyServer, Served
from keepstep.one_copy.copies.rank_state import RankState
from keepstep.one_copy.copies.shard_reader import ShardReader
from keepstep.one_copy.core.holding import Holding
from keepstep.one_copy.core.recovery_plan import Recovery, Source, Way
from keepstep.one_copy.recovery.cutting_again import plan_reads, read_shards


class Sources:
    """Reads what this rank needs from the ranks that a plan names.

    Args:
        recovery: the plan.
        holdings: of all ranks.
        reader: of the previous world at the target.
    """

    def __init__(self, recovery: Recovery, holdings: Sequence[Holding], reader: ShardReader) -> None:
        self._recovery = recovery
        self._holdings = holdings
        self._reader = reader

    def shard_of(self, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the shard of a rank of the previous world, and its ``end`` with the ``shared`` state."""
        source = self._recovery.sources[rank]
        return self._reader.read(self._address(source), source.rank, copy=source.way is Way.COPY)

    def shared(self) -> dict[str, Any]:
        """Return the state that all ranks have in common, empty if no rank has it, and the end of a rank."""
        live = [one for one in self._recovery.sources if one.way is not Way.COPY] or self._recovery.sources
        source = next((one for one in live if one.holder == self._recovery.shared), live[0])
        return self._reader.read(self._address(source), source.rank, copy=source.way is Way.COPY, cuts={})[1]

    def cut_again(self, tensors: RankState, own: int) -> dict[str, Any]:
        """Return the new shards of this rank.

        Args:
            tensors: of the model that was built for the new world.
            own: index of this rank's holding, whose shard is read first.
        """
        sources = sorted(self._recovery.sources, key=lambda one: (one.holder != own, one.way is Way.COPY, one.rank))
        held = [self._reader.boxes(self._address(one), one.rank, copy=one.way is Way.COPY) for one in sources]
        needed = tensors.boxes

        def read(index: int, cuts: dict[str, Any]) -> dict[str, Any]:
            one = sources[index]
            return self._reader.read(self._address(one), one.rank, copy=one.way is Way.COPY, cuts=cuts)[0]

        return read_shards(needed, plan_reads(needed, held), read)

    def _address(self, source: Source) -> str:
        return self._holdings[source.holder].address


@contextlib.contextmanager
def serving(server: CopyServer, served: Served | None) -> Any:
    """Serve the shard of this rank, which does not change in the meantime."""
    server.serve(served)
    try:
        yield
    finally:
        server.serve(None)
