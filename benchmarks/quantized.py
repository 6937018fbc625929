"""Measure a quantized all-reduce of two groups beside one of float32, on loopback and over 1 Gbit/s.

Each group is a process on Gloo; over 1 Gbit/s each has a network namespace of its own, behind a token bucket (root,
iproute2). The kinds take turns. A reduction ends when the last group has the result. torchft is not beside it: its
quantized all-reduce runs on CUDA only.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from figures import Figure, Limit, p50
from peers import Peer
from sides import HERE, ROOT, keepstep_side

sys.path.insert(0, str(ROOT))

from tests.support.network.namespaces import LOOPBACK, Host, Namespaces, why_not

SIZES_MIB = (1, 16, 128)
RATE = "1gbit"
TURNS = 4
GROUPS = 2
FASTER = 3
"""Goal over 1 Gbit/s: this many times as fast as float32."""


class Groups:
    """The processes of the groups."""

    def __init__(self, hosts: list[Host], log: Path, stack: contextlib.ExitStack) -> None:
        side, store = keepstep_side(), ""
        self._peers: list[Peer] = []
        for rank, host in enumerate(hosts):
            command = [*host.command, side.python, HERE / "quantized_ends.py", rank, len(hosts), host.address, store]
            self._peers.append(Peer(side, command, log, stack))
            store = store or self._peers[0].answer()[0]
        for peer in self._peers:
            peer.answer("ready")

    def reduce(self, kind: str, mib: int) -> tuple[float, float, float]:
        """Return the milliseconds of the slowest group, the most bytes that one sent, and the relative error."""
        for peer in self._peers:
            peer.tell(f"{kind} {mib}")
        seconds, sent, errors = zip(*(map(float, peer.answer()) for peer in self._peers), strict=True)
        return max(seconds) * 1e3, max(sent), max(errors)


def measure(place: str, hosts: list[Host], *, quick: bool, log: Path) -> list[Figure]:
    figures = []
    with contextlib.ExitStack() as stack:
        groups = Groups(hosts, log, stack)
        for mib in SIZES_MIB:
            found: dict[str, list[tuple[float, float, float]]] = {"fp32": [], "int8": []}
            for turn in range((2 if quick else TURNS) + 1):
                for kind, samples in found.items():
                    seen = groups.reduce(kind, mib)
                    if turn:  # the first fills caches
                        samples.append(seen)
            ours, plain = ([one[0] for one in found[kind]] for kind in ("int8", "fp32"))
            bytes_sent = {kind: p50([one[1] for one in samples]) for kind, samples in found.items()}
            print(f"{mib} MiB, {place}: int8 {p50(ours):.1f} ms, fp32 {p50(plain):.1f} ms", flush=True)
            figures.append(
                Figure(
                    f"quantized all-reduce of {mib} MiB, {place}",
                    "ms",
                    "p50",
                    ours,
                    plain,
                    Limit(times_theirs=1 / FASTER) if place != "loopback" and mib > 1 else None,
                    beside="float32",
                    definition="from a barrier until the last of two groups has the average",
                    also={"bytes_sent": bytes_sent, "relative_error": max(one[2] for one in found["int8"])},
                )
            )
    return figures


def run(*, quick: bool, log: Path) -> list[Figure]:
    figures = measure("loopback", [LOOPBACK] * GROUPS, quick=quick, log=log)
    if reason := why_not():
        print(f"quantized over {RATE}/s: left out: {reason}", flush=True)
        return figures
    with Namespaces() as network:
        hosts = [network.host(f"group-{number}") for number in range(GROUPS)]
        for number in range(GROUPS):
            network.limit(f"group-{number}", RATE)
        figures += measure(f"{RATE}/s", hosts, quick=quick, log=log)
    return figures
