"""Measure eight joiners of one source with 1 Gbit/s for every host, relative to one joiner.

Source, relay, and each joiner are processes in network namespaces of their own, each behind a token bucket of 1 Gbit/s
in both directions, joined by a router. All joiners ask at once for a staged state of 128 MiB, and the time ends with
the last ``recv_checkpoint``. torchft's joiners all ask its source, without chunks. Needs root and iproute2; without
them it prints that and measures nothing.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from figures import Figure, Limit, p50
from sides import ROOT, Side, relay, stop
from transfer import TENSOR_BYTES, End

sys.path.insert(0, str(ROOT))

from tests.support.network.namespaces import Namespaces, why_not

JOINERS = 8
SIZE = 128 << 20
RATE = "1gbit"


def measure(
    side: Side, network: Namespaces, *, size: int, turns: int, log: Path
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Return seconds by number of joiners: of all of them, and of the median one."""
    took: dict[int, list[float]] = {1: [], JOINERS: []}
    middle: dict[int, list[float]] = {1: [], JOINERS: []}
    with contextlib.ExitStack() as stack:

        def end(role: str, name: str) -> End:
            host = network.host(name)
            one = End(
                side, role, size, size // TENSOR_BYTES, log, address=host.address, name=name, command=host.command
            )
            stack.callback(stop, one.process)
            return one

        how: dict[str, object] = {"num_chunks": 0, "in_place": side.name == "keepstep"}
        if side.name == "keepstep":
            host = network.host("relay")
            through = stack.enter_context(relay(side, log, address=host.address, command=host.command))
            how |= {"relay": through.address, "sources": ["source"]}
        source = end("source", "source")
        joiners = [end("joiner", f"joiner-{number}") for number in range(JOINERS)]
        step = 0
        for turn in range(turns + 1):
            for count in (1, JOINERS):
                step += 1
                how["joiners"] = [f"joiner-{number}" for number in range(count)]
                staged = source.ask(stage=step, **how)
                for joiner in joiners[:count]:
                    joiner.tell(receive=step, **{"from": staged["metadata"]}, **how)
                seen = [joiner.answer() for joiner in joiners[:count]]
                seconds = max(one["ended"] for one in seen) - staged["staged"]
                print(f"{count} joiners of {size >> 20} MiB, {side.name}: {seconds:.2f} s", flush=True)
                if turn:
                    took[count].append(seconds)
                    middle[count].append(p50([one["seconds"] for one in seen]))
    return took, middle


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    if reason := why_not():
        print(f"swarm: left out: {reason}", flush=True)
        return []
    found = {}
    with Namespaces() as network:
        for name in ("relay", "source", *(f"joiner-{number}" for number in range(JOINERS))):
            network.host(name)
            network.limit(name, RATE)
        for side in (ours, theirs):
            size = SIZE // 4 if quick else SIZE
            turns = (1 if quick else 5) if side is ours else 1  # theirs takes what the line takes
            found[side.name], middle = measure(side, network, size=size, turns=turns, log=log)
            if side is ours:
                ours_middle = middle
    mine, other = found[ours.name], found[theirs.name]
    label = f"{JOINERS} joiners behind {RATE}/s each, {size >> 20} MiB"
    also: dict[str, object] = {"the_middle_joiner_s": ours_middle}
    return [
        Figure(
            f"{label}: times the time of one",
            "x",
            "p50",
            _times(mine),
            _times(other),
            Limit(value=1.5),
            definition="staged state to the end of the last recv_checkpoint, over one joiner's of the same turn",
        ),
        Figure(f"{label}", "s", "p50", mine[JOINERS], other[JOINERS], also=also),
        Figure("the same, one joiner", "s", "p50", mine[1], other[1]),
    ]


def _times(took: dict[int, list[float]]) -> list[float]:
    return [many / one for one, many in zip(took[1], took[JOINERS], strict=True)]
