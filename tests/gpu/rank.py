"""One rank of a check, in a process of its own.

Its argument is a JSON object with the fields of ``Order``. The result of the check goes to a file, as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from keepstep.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

TIMEOUT = timedelta(seconds=30)
"""Limit of each operation and of each meeting of the ranks."""
READY = "ready"
"""Prefix of the keys that the ranks set when they are ready."""
CYCLES_PER_SECOND = 2_000_000_000
"""Clock of a fast GPU; a slower one stays busy for longer."""


@dataclass(frozen=True)
class Order:
    """The part of one process in a check."""

    check: str
    index: int
    ranks: int
    device: str
    """``cpu``, or ``cuda:N``."""
    store: str
    """``host:port`` of the runner's TCPStore."""
    lighthouse: str
    """Its URL; empty: the check needs none."""
    life: int
    """Number of starts of this rank before this one."""
    result: str
    """File for the result."""


class Rank:
    """The tools of a check: the device, a process group, and the other ranks."""

    def __init__(self, order: Order) -> None:
        self.index, self.ranks, self.life = order.index, order.ranks, order.life
        self.lighthouse = order.lighthouse
        self.folder = Path(order.result).parent  # of all ranks and all checks of the run
        self.device = torch.device(order.device)
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        self._store_address = order.store
        self._store = self.store("ranks")
        self._open: list[ProcessGroup] = []

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def process_group(self, timeout: timedelta = TIMEOUT) -> ProcessGroup:
        """Return a process group for the tensors of this device. It is shut down after the check."""
        group = ProcessGroupNCCL(timeout) if self.on_gpu else ProcessGroupGloo(timeout)
        self._open.append(group)
        return group

    def configure(self, group: ProcessGroup, quorum: int, ranks: Sequence[int] | None = None) -> None:
        """Connect ``group`` with the same one of ``ranks``; default: of all ranks."""
        members = list(range(self.ranks)) if ranks is None else list(ranks)
        address = f"{self._store_address}/quorum/{quorum}/{'-'.join(map(str, members))}"
        group.configure(address, f"r{self.index}", members.index(self.index), len(members), quorum)

    def full(self, value: float, size: int = 1 << 20, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype, device=self.device)

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def occupy(self, seconds: float) -> None:
        """Keep the current stream busy. No effect on a CPU."""
        if self.on_gpu:
            torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))

    def address(self, prefix: str) -> str:
        """Return the address of a store that the ranks share, as ``configure`` of a process group takes it."""
        return f"{self._store_address}/{prefix}"

    # ---- the other ranks

    def store(self, prefix: str) -> Store:
        """Return a store that the ranks share."""
        host, _, port = self._store_address.rpartition(":")
        return PrefixStore(prefix, TCPStore(host, int(port), is_master=False, timeout=TIMEOUT))

    def tell(self, key: str, value: str = "1") -> None:
        self._store.set(key, value)

    def told(self, key: str) -> str | None:
        """Return the value of ``key`` if a rank has told it."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def await_told(self, key: str) -> str:
        self._store.wait([key], TIMEOUT)
        return self._store.get(key).decode()

    def meet(self, place: str) -> None:
        """Wait until all ranks are here."""
        self.tell(f"{place}/{self.index}")
        self._store.wait([f"{place}/{one}" for one in range(self.ranks)], TIMEOUT)

    def close(self) -> None:
        for group in self._open:
            group.shutdown()


def seconds_of(do: Callable[[], object]) -> float:
    """Return how long ``do`` takes."""
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def main(text: str) -> None:
    """Run the rank of an ``Order`` as JSON."""
    from tests.gpu.checks import CHECKS

    order = Order(**json.loads(text))
    torch.set_num_threads(1)
    faulthandler.enable()  # the runner ends a late rank with SIGABRT
    rank = Rank(order)
    rank.store(READY).set(str(order.index), "1")
    check = CHECKS[order.check]
    found: dict[str, Any] = check.run(rank) or {}
    Path(order.result).write_text(json.dumps(found))
    rank.close()
