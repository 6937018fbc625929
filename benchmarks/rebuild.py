"""Measure a rebuild of the process group, by members: over keepstep's rendezvous and over torch's TCPStore.

Every member is a process. All leave their Gloo group and build the next one at the same time, as after a change of the
quorum. A rebuild ends when the last member is connected to all others. The two stores take turns. Member 0 hosts both,
so neither has a host of its own. Clients of the TCPStore stay connected; keepstep's connect for each rebuild.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from figures import Figure, p50
from peers import Peer
from sides import HERE, Side, keepstep_side

SIZES = (2, 4, 8, 16)
REBUILDS = 20
WARM_UP = 3


class Members:
    def __init__(self, side: Side, size: int, log: Path, stack: contextlib.ExitStack) -> None:
        command = [side.python, HERE / "rebuild_ends.py"]
        self._peers = [Peer(side, [*command, rank, size], log, stack) for rank in range(size)]
        (ours, tcp), *_ = [peer.answer("ready") for peer in self._peers]
        self.addresses = {"ours": ours, "tcp": tcp}

    def rebuild(self, kind: str, number: int) -> float:
        """Return the milliseconds until the last member is done."""
        began = time.perf_counter()
        for peer in self._peers:
            peer.tell(f"{kind} {number} {self.addresses[kind]}")
        for peer in self._peers:
            peer.answer("built")
        return (time.perf_counter() - began) * 1e3

    def counts(self) -> dict[str, int]:
        """Return counters of keepstep's table since the last call: bytes held, HTTP requests, bytes answered."""
        self._peers[0].tell("counts")
        return dict(zip(("held", "requests", "sent"), map(int, self._peers[0].answer()), strict=True))


def run(*, quick: bool, log: Path, sizes: tuple[int, ...] = SIZES) -> list[Figure]:
    figures = []
    for size in sizes:
        print(f"rebuild, {size} members ...", flush=True)
        times: dict[str, list[float]] = {"ours": [], "tcp": []}
        counts = []
        with contextlib.ExitStack() as stack:
            members = Members(keepstep_side(), size, log, stack)
            for number in range(1, WARM_UP + (REBUILDS // 4 if quick else REBUILDS) + 1):
                for kind, found in times.items():
                    took = members.rebuild(kind, number)
                    if number > WARM_UP:
                        found.append(took)
                counts.append(members.counts())
        also = {f"rendezvous_{key}": p50([one[key] for one in counts[WARM_UP:]]) for key in counts[0]}
        definition = "from the order to leave the Gloo group until the last member is connected in the next"
        figures.append(
            Figure(
                f"rebuild, {size} members",
                "ms",
                "p50",
                times["ours"],
                times["tcp"],
                beside="TCPStore",
                definition=definition,
                also=also,
            )
        )
    return figures
