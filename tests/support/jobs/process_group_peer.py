"""One rank of a process group in a process of its own, told what to do over its standard input.

Each line is a JSON object: ``id``, ``do``, arguments. Each answer is a line with that ``id`` and ``ok`` or ``error``;
one with ``begun`` comes before it when a collective is under way. Commands run in order on the main thread, ``abort``
at once on the reading thread.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from keepstep.process_group import ProcessGroupGloo
from keepstep.process_group.torch_backends import backend_work, communicator
from keepstep.rendezvous.store_client import RendezvousStore, Table

communicator.LOOK = backend_work.LOOK = 20  # type: ignore[attr-defined]  # imported by name
"""Look for lost peers every 0.5 s, in place of 1 s: several tests wait for that and for nothing else."""


class Peer:
    def __init__(self, store: str, rank: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.timeout = timedelta(seconds=timeout)
        self.group = ProcessGroupGloo(self.timeout)
        self.tensor = torch.zeros(0)
        self.begun: Callable[[], None] = lambda: None

    def configure(self, quorum: int, world: int, rank: int | None = None) -> None:
        rank = self.rank if rank is None else rank
        store = RendezvousStore(self.store, Table(quorum_id=quorum), timeout=self.timeout)
        try:
            self.group.configure("", f"r{rank}", rank, world, quorum, store=store)
        finally:
            store.close()

    def allreduce(self, size: int = 4) -> list[float]:
        self.tensor = torch.full((size,), float(self.rank + 1))
        self._over(self.group.allreduce([self.tensor]))
        return [self.tensor.min().item(), self.tensor.max().item()]

    def future(self, size: int = 4) -> None:
        self.tensor = torch.full((size,), float(self.rank + 1))
        self._over(self.group.allreduce([self.tensor]).get_future())

    def barrier(self) -> None:
        self._over(self.group.barrier())

    def send(self, to: int, size: int) -> None:
        self.tensor = torch.ones(size)
        self._over(self.group.send([self.tensor], to, 0))

    def recv(self, source: int, size: int) -> None:
        self.tensor = torch.zeros(size)
        self._over(self.group.recv([self.tensor], source, 0))

    def broadcast(self, root: int, size: int) -> None:
        self.tensor = torch.full((size,), float(self.rank + 1))
        self._over(self.group.broadcast([self.tensor], root))

    def _over(self, work: Any) -> None:
        self.begun()
        work.wait()

    def changes_within(self, seconds: float) -> bool:
        """Whether something still writes to the tensor of the last operation."""
        before = self.tensor.clone()
        time.sleep(seconds)  # no event says that a write is late
        return not torch.equal(before, self.tensor)

    def usage(self) -> dict[str, int]:
        with open("/proc/self/statm") as statm:  # noqa: PTH123
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        return {
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            "resident": resident,
        }

    def reconfigure_often(self, first: int, times: int, world: int) -> list[dict[str, int]]:
        seen = []
        for quorum in range(first, first + times):
            self.configure(quorum, world)
            self.allreduce()
            seen.append(self.usage())
        return seen

    def errored(self) -> str | None:
        error = self.group.errored()
        return None if error is None else f"{type(error).__name__}: {error}"

    def shutdown(self) -> None:
        self.group.shutdown()


def main() -> None:
    store, rank, timeout = sys.argv[1:]
    torch.set_num_threads(1)
    peer = Peer(store, int(rank), float(timeout))
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    printing = threading.Lock()

    def answer(command: dict[str, Any], **answer: Any) -> None:
        with printing:
            print(json.dumps({"id": command["id"], "at": time.time(), **answer}), flush=True)

    def run(command: dict[str, Any]) -> None:
        arguments = {key: value for key, value in command.items() if key not in {"id", "do"}}
        try:
            if command["do"] == "abort":
                target: Callable[..., Any] = peer.group.abort
            else:
                target = getattr(peer, command["do"])
                peer.begun = lambda: answer(command, begun=True)
            answer(command, ok=target(**arguments))
        except Exception as error:  # noqa: BLE001
            answer(command, error=f"{type(error).__name__}: {error}")

    def read() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "abort":
                run(command)
            else:
                commands.put(command)
        commands.put({"do": "exit"})

    threading.Thread(target=read, daemon=True).start()
    while (command := commands.get())["do"] != "exit":
        run(command)
    peer.group.shutdown()


if __name__ == "__main__":
    main()
