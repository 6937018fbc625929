"""Measure the transfer of state from one process to another over loopback: rate, and memory at both ends.

A source and a joiner of each library run as processes of their own; the two libraries take turns, transfer by transfer.
The time is that of ``recv_checkpoint`` for a staged state. keepstep verifies the digest of every chunk and writes into
the joiner's tensors. torchft unpickles into new memory without verification, and its user then copies that into the
model.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Figure, Limit, p50
from sides import HERE, Side, stop

GIB = 1 << 30
TENSOR_BYTES = 4 << 20
NUM_CHUNKS = (0, 4, 16)
SMALL_TENSORS = 10_000
TURNS = 5


class End:
    """A process of ``script`` at ``address``; ``command`` is a prefix for its own."""

    def __init__(
        self,
        side: Side,
        role: str,
        size: int,
        tensors: int,
        log: Path,
        *,
        script: str = "transfer_ends.py",
        address: str = "127.0.0.1",
        name: str = "",
        command: tuple[str, ...] = (),
    ) -> None:
        own = [str(side.python), str(HERE / script), side.name, role, str(size), str(tensors), address, name or role]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, *own],
                env=side.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        self._log = log

    def ask(self, **question: object) -> dict[str, Any]:
        self.tell(**question)
        return self.answer()

    def tell(self, **question: object) -> None:
        """Send a command; call ``answer`` next."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"an end of the transfer has ended; see {self._log}")


@contextlib.contextmanager
def all_ends(side: Side, size: int, tensors: int, log: Path) -> Iterator[tuple[End, dict[bool, End]]]:
    """Start a source, and a joiner for each way to receive (in place or not), so that they share no memory."""
    ways = (True, False) if side.name == "keepstep" else (False,)
    source = End(side, "source", size, tensors, log)
    joiners = {in_place: End(side, "joiner", size, tensors, log) for in_place in ways}
    try:
        yield source, joiners
    finally:
        for end in (source, *joiners.values()):
            stop(end.process)


class Samples:
    """By (what, number of chunks, in place)."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, int, bool], list[float]] = defaultdict(list)

    def best(self, what: str, *, in_place: bool) -> tuple[int, list[float]]:
        """Return the number of chunks with the highest median rate, and its samples."""
        found = {chunks: rates for (kind, chunks, place), rates in self.of.items() if (kind, place) == (what, in_place)}
        chunks = max(found, key=lambda one: p50(found[one]))
        return chunks, found[chunks]


def measure(sides: tuple[Side, Side], size: int, tensors: int, turns: int, log: Path) -> dict[str, Samples]:
    samples = {side.name: Samples() for side in sides}
    with contextlib.ExitStack() as stack:
        ends = {side.name: stack.enter_context(all_ends(side, size, tensors, log)) for side in sides}
        for turn in range(turns + 1):
            for chunks in NUM_CHUNKS:
                for name, (source, joiners) in ends.items():
                    for in_place, joiner in joiners.items():
                        staged = source.ask(stage=turn, num_chunks=chunks)
                        question = {"receive": turn, "from": staged["metadata"], "num_chunks": chunks}
                        seen = joiner.ask(**question, in_place=in_place)
                        if turn == 0:
                            continue
                        of = samples[name].of
                        of["rate", chunks, in_place].append(size / 1e9 / seen["seconds"])
                        of["receive", chunks, in_place].append(seen["seconds"] * 1e3)
                        of["stage", 0, False].append(staged["seconds"] * 1e3)
                        of["joiner memory", 0, in_place].append(seen["peak"] / size)
                        of["source memory", 0, False].append(staged["extra"] / size)
    return samples


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    turns = 3 if quick else TURNS
    large = measure((ours, theirs), GIB, GIB // TENSOR_BYTES, turns, log)
    small = measure((ours, theirs), SMALL_TENSORS * 1024, SMALL_TENSORS, turns, log)
    mine, other = large["keepstep"], large["torchft"]
    label = "transfer 1 GiB"
    best, rates = mine.best("rate", in_place=True)
    their_best, their_rates = other.best("rate", in_place=False)
    figures = [
        Figure(
            f"{label}, best of each",
            "GB/s",
            "p50",
            rates,
            their_rates,
            Limit(value=2.0, times_theirs=1.0),
            more_is_better=True,
            definition="recv_checkpoint, process to process over loopback; ours verified, in place; theirs new memory",
            also={"num_chunks": {"keepstep": best, "torchft": their_best}},
        )
    ]
    for chunks in NUM_CHUNKS:
        for in_place, words in ((True, "in place"), (False, "into new memory")):
            name = f"{label}, {chunks} chunks, {words}"
            their = other.of["rate", chunks, False]
            figures.append(Figure(name, "GB/s", "p50", mine.of["rate", chunks, in_place], their, more_is_better=True))
    figures += [
        Figure(f"{label}: staging", "ms", "p50", mine.of["stage", 0, False], other.of["stage", 0, False]),
        Figure(
            f"{label}: memory of the joiner",
            "x state",
            "max",
            mine.of["joiner memory", 0, True],
            other.of["joiner memory", 0, False],
            Limit(value=1.1),
            definition="peak resident memory less that before the joiner had a state",
        ),
        Figure(
            f"{label}: memory of the source",
            "x state",
            "max",
            mine.of["source memory", 0, False],
            other.of["source memory", 0, False],
            Limit(value=1.05),
            definition="peak resident memory less that before the first transfer; the target is 1.0 beside the process",
        ),
    ]
    mine, other = small["keepstep"], small["torchft"]
    name = f"transfer {SMALL_TENSORS} tensors of 1 KiB"
    figures += [
        Figure(name, "ms", "p50", mine.of["receive", 0, True], other.of["receive", 0, False], Limit(times_theirs=1.0)),
        Figure(f"{name}: staging", "ms", "p50", mine.of["stage", 0, False], other.of["stage", 0, False]),
    ]
    return figures
