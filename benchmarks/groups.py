"""Measure process groups beside torchft's: reconfiguration by members, all-reduce, the way to a child process and back.

Every member is a process of its own. ``Gloo`` communicates in that process, ``BabyGloo`` in a child of it. The two
libraries take turns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from figures import Figure, Limit
from peers import Peer
from sides import HERE, Side

NAMES = {"gloo": "Gloo", "baby": "BabyGloo"}
SIZES = {"gloo": (2, 8, 16), "baby": (2,)}
"""With more members than cores, torchft's start of a child for each member and turn takes minutes."""
REBUILDS = {"gloo": 20, "baby": 5}
WARM_UP = 2
TENSORS = {2**20: 100, 16 * 2**20: 30, 128 * 2**20: 8}
"""Bytes of a tensor: number of all-reduces."""
ROUND_TRIPS = 1000


class Members:
    """Processes of one library."""

    def __init__(self, side: Side, size: int, log: Path, stack: contextlib.ExitStack) -> None:
        self._number = 0
        command = [side.python, HERE / "group_ends.py", "--library", side.name]
        self._peers = [Peer(side, [*command, *([] if rank else ["--hosts"])], log, stack) for rank in range(size)]
        (self._address, *_), *_ = [peer.answer("ready") for peer in self._peers]

    def configure(self, kind: str) -> float:
        """Return the milliseconds until the last member is connected to all others."""
        self._number += 1
        size = len(self._peers)
        return self._all(lambda rank: f"configure {kind} {rank} {size} {self._number} {self._address}")[0]

    def allreduce(self, kind: str, size: int, count: int) -> list[float]:
        """Return the milliseconds of each all-reduce on member 0."""
        return [float(one) for one in self._all(lambda _: f"allreduce {kind} {size} {count}")[1]]

    def _all(self, line: Callable[[int], str]) -> tuple[float, list[str]]:
        """Send each member a line. Return the milliseconds until the last has answered, and member 0's answer."""
        began = time.perf_counter()
        for rank, peer in enumerate(self._peers):
            peer.tell(line(rank))
        answers = [peer.answer("done") for peer in self._peers]
        return (time.perf_counter() - began) * 1e3, answers[0]


class Samples:
    """Milliseconds of both sides by name of the figure."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[float]]] = {}

    def add(self, name: str, side: Side, milliseconds: list[float]) -> None:
        self.found.setdefault(name, {}).setdefault(side.name, []).extend(milliseconds)


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    samples = Samples()
    share = 4 if quick else 1
    for size in SIZES["gloo"]:
        for side in (theirs, ours):
            print(f"process groups of {size} members: {side.name} ...", flush=True)
            with contextlib.ExitStack() as stack:
                members = Members(side, size, log, stack)
                for kind in (one for one, sizes in SIZES.items() if size in sizes):
                    times = [members.configure(kind) for _ in range(WARM_UP + max(2, REBUILDS[kind] // share))]
                    samples.add(f"reconfigure {NAMES[kind]}, {size} members", side, times[WARM_UP:])
                    if size == 2:
                        _reduce(members, side, kind, samples, share)
    for side in (theirs, ours):
        with contextlib.ExitStack() as stack:
            members = Members(side, 1, log, stack)
            members.configure("baby")
            members.allreduce("baby", 4, 20)
            samples.add("round trip to the child", side, members.allreduce("baby", 4, ROUND_TRIPS // share))
    return [
        Figure(
            name,
            "ms",
            "p50",
            found[ours.name],
            found[theirs.name],
            Limit(times_theirs=1),
            definition=_definition(name),
        )
        for name, found in samples.found.items()
    ]


def _reduce(members: Members, side: Side, kind: str, samples: Samples, share: int) -> None:
    for size, count in TENSORS.items():
        members.allreduce(kind, size, 2)
        times = members.allreduce(kind, size, max(4, count // share))
        samples.add(f"all-reduce of {size >> 20} MiB, {NAMES[kind]}, 2 members", side, times)


def _definition(name: str) -> str:
    if name.startswith("reconfigure"):
        return "from the order to leave the group until the last member is connected in the next one"
    if name.startswith("round trip"):
        return "an all-reduce of 4 bytes in a BabyGloo group of one member"
    return "from the call until wait returns, on member 0"
