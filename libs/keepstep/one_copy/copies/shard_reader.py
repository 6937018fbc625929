"""Read the shard of a rank from the process that has it, or keeps its copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.one_copy.copies.frames import CopyError, connect
from keepstep.one_copy.copies.rank_state import Boxes
from keepstep.one_copy.core.holding import State
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.security.tokens import ClientToken


@dataclass(frozen=True)
class ShardReader:
    """Reads shards of the ranks of one world at one state.

    Args:
        token: of the job.
        world: number of the world.
        state: at which shards are read.
        limit: longest time without progress, seconds.
        ended: returns why waits end early; empty: they go on.
    """

    token: ClientToken
    world: int
    state: State
    limit: float
    ended: Callable[[], str]

    def boxes(self, address: str, rank: int, *, copy: bool) -> Boxes:
        """Return the boxes of the shard of ``rank``.

        Args:
            address: ``host:port`` of the ``CopyServer``.
            rank: in the world.
            copy: ask for the copies that the process keeps, and not for its own shard.

        Raises:
            CopyError: the shard is not there, or the process is lost.
        """
        link = connect(address, self.token, self.limit, self.ended)
        try:
            link.send(self._request(rank, copy=copy) | {"boxes": True}, limit=self.limit)
            header = link.receive(self.limit)
            if header["kind"] == "refused":
                raise CopyError(f"{address}: {header['reason']}")
            found: Boxes = header["boxes"]
            return found
        finally:
            link.close()

    def read(
        self, address: str, rank: int, *, copy: bool, cuts: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the shard of ``rank``.

        Args:
            address: as in ``boxes``.
            rank: as in ``boxes``.
            copy: as in ``boxes``.
            cuts: parts of parameters that are read, see ``copy_server.Cuts``; None: all.

        Returns:
            The state of each parameter by its name; and ``end`` (options, buffers, random state) with ``shared``.

        Raises:
            CopyError: the shard is not there, or the process is lost.
        """
        link = connect(address, self.token, self.limit, self.ended)
        try:
            link.send(self._request(rank, copy=copy) | {"cuts": cuts}, limit=self.limit)
            found: dict[str, Any] = {}
            while True:
                header = link.receive(self.limit)
                if header["kind"] == "refused":
                    raise CopyError(f"{address}: {header['reason']}")
                try:
                    part = link.receive_state(header, self.limit)
                except (KeepstepError, KeyError) as error:
                    raise CopyError(f"{address}: {error}") from error
                if header["kind"] == "end":
                    return found, part
                found.update(part)
        finally:
            link.close()

    def _request(self, rank: int, *, copy: bool) -> dict[str, Any]:
        state = self.state
        return {
            "kind": "read",
            "world": self.world,
            "rank": rank,
            "step": state.step,
            "lineage": state.lineage,
            "copy": copy,
        }
