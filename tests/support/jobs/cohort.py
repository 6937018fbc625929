"""The ranks of a process group on Gloo, each in a thread of one process."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from keepstep.process_group import ProcessGroup, ProcessGroupGloo
from keepstep.rendezvous.store_client import KeyValueServer, RendezvousStore, Table

T = TypeVar("T")


class Cohort:
    """The ranks of Gloo groups, each in a thread of this process, over real sockets."""

    def __init__(
        self,
        size: int,
        timeout: timedelta = timedelta(seconds=30),
        kind: Callable[[timedelta], ProcessGroup] = ProcessGroupGloo,
    ) -> None:
        self.server = KeyValueServer()
        self.groups = [kind(timeout) for _ in range(size)]
        self.quorum = 0
        self._threads = concurrent.futures.ThreadPoolExecutor(size)

    def each(self, do: Callable[[ProcessGroup, int], T]) -> list[T]:
        """Run ``do(group, rank)`` in all ranks at the same time; return the results."""
        return [future.result(60) for future in self.begin(do)]

    def begin(self, do: Callable[[ProcessGroup, int], T]) -> list[concurrent.futures.Future[T]]:
        return [self._threads.submit(do, group, rank) for rank, group in enumerate(self.groups)]

    def store(self) -> RendezvousStore:
        return RendezvousStore("http://127.0.0.1:1", Table(quorum_id=self.quorum), server=self.server)

    def configure(self, host: str | None = None) -> None:
        """Configure a new group of all ranks."""
        self.quorum += 1
        size = len(self.groups)
        self.each(
            lambda group, rank: group.configure("", f"r{rank}", rank, size, self.quorum, store=self.store(), host=host)
        )

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        self._threads.shutdown()
        self.server.close()
