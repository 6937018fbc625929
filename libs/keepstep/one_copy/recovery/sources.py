"""Carry out the plan of a recovery: bring the shard of this rank to the target."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

from keepstep.one_copy.copies.copy_server import CopyServer, Cuts, Served, slices_of
from keepstep.one_copy.copies.rank_state import Boxes, RankState
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
        server: of this process. Shards and copies that it has are read from memory.
    """

    def __init__(
        self, recovery: Recovery, holdings: Sequence[Holding], reader: ShardReader, server: CopyServer
    ) -> None:
        self._recovery = recovery
        self._holdings = holdings
        self._reader = reader
        self._server = server

    def shard_of(self, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the shard of a rank of the previous world, and its ``end`` with the ``shared`` state."""
        return self._read(self._recovery.sources[rank])

    def shared(self) -> dict[str, Any]:
        """Return the state that all ranks have in common, empty if no rank has it, and the end of a rank."""
        live = [one for one in self._recovery.sources if one.way is not Way.COPY] or self._recovery.sources
        source = next((one for one in live if one.holder == self._recovery.shared), live[0])
        return self._read(source, {})[1]

    def cut_again(self, tensors: RankState, own: int) -> dict[str, Any]:
        """Return the new shards of this rank.

        Args:
            tensors: of the model that was built for the new world.
            own: index of this rank's holding, whose shard is read first.
        """
        sources = sorted(self._recovery.sources, key=lambda one: (one.holder != own, one.way is Way.COPY, one.rank))
        held = [self._boxes(one) for one in sources]
        needed = tensors.boxes

        def read(index: int, cuts: dict[str, Any]) -> dict[str, Any]:
            return self._read(sources[index], cuts)[0]

        return read_shards(needed, plan_reads(needed, held), read)

    def _boxes(self, source: Source) -> Boxes:
        if (here := self._here(source)) is not None:
            return here.boxes
        return self._reader.boxes(self._address(source), source.rank, copy=source.way is Way.COPY)

    def _read(self, source: Source, cuts: Cuts | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what ``ShardReader.read`` does. Tensors of a shard of this process are in its own memory."""
        if (here := self._here(source)) is None:
            return self._reader.read(self._address(source), source.rank, copy=source.way is Way.COPY, cuts=cuts)
        found: dict[str, Any] = {}
        for part in slices_of(here, cuts):
            found.update(part)
        return found, copy.deepcopy({"end": here.end, "shared": here.shared})

    def _here(self, source: Source) -> Served | None:
        """Return the shard of a source that is this process; None: it is another one."""
        if self._address(source) != self._server.address:
            return None
        return self._server.find(self._reader.world, source.rank, self._reader.state, copy=source.way is Way.COPY)

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
