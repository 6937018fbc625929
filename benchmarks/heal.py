"""Measure 1 GiB of live state to one joiner: through a relay and directly, beside torchft and raw sockets.

Source, relay, and joiner are processes of their own, on loopback; all ways take turns, transfer by transfer. A time
runs from the return of ``send_checkpoint`` at the source to that of ``recv_checkpoint`` at the joiner, which waits for
it. It includes hashing and, for the relay, the whole upload. After each transfer the relay drops the state, so that it
reuses the memory. The first transfer, without allocated memory, is a separate figure. The relay's longest answer is
measured in separate transfers, so that its requests slow down no other.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

from figures import Figure, Limit, mean, p50
from relay import stall_watch
from sides import Side, relay, stop
from transfer import GIB, NUM_CHUNKS, TENSOR_BYTES, End

DIRECT_STREAMS = 4
"""The Manager's default."""
RAW_STREAMS = (1, 4)
COMMIT_SECONDS = 10.0
RELAY_MEMORY = 4 * GIB
"""The default of its command."""


class Heal:
    """The ends of all ways."""

    def __init__(self, ours: Side, theirs: Side, size: int, log: Path, stack: contextlib.ExitStack) -> None:
        self._size = size
        self._step = 0
        self._relay = stack.enter_context(relay(ours, log, "--memory", str(RELAY_MEMORY)))
        self._relay_before = self._relay.forget_peak()
        tensors = max(1, size // TENSOR_BYTES)
        self._ends: dict[str, tuple[End, End]] = {}
        """By side; both ways of ours have the same."""
        for side in (ours, theirs, Side("raw", ours.python)):
            script = "raw_ends.py" if side.name == "raw" else "transfer_ends.py"
            ends = [End(side, role, size, tensors, log, script=script) for role in ("source", "joiner")]
            for end in ends:
                stack.callback(stop, end.process)
            self._ends[side.name] = ends[0], ends[1]
        self.samples: dict[tuple[str, int], list[float]] = defaultdict(list)
        """GB/s, by way and number of chunks or streams."""
        self.source_memory: dict[str, list[float]] = defaultdict(list)
        self.joiner_memory: dict[str, list[float]] = defaultdict(list)

    def transfer(self, way: str, chunks: int) -> float:
        """Seconds."""
        self._step += 1
        source, joiner = self._ends.get(way) or self._ends["keepstep"]
        how: dict[str, object] = {"num_chunks": chunks}
        if way == "relay":
            how |= {"relay": self._relay.address, "sources": ["source"], "joiners": ["joiner"]}
        staged = source.ask(stage=self._step, **how)
        in_place = way in ("relay", "direct")
        seen = joiner.ask(receive=self._step, **{"from": staged["metadata"]}, in_place=in_place, **how)
        self.source_memory[way].append(staged["extra"] / self._size)
        self.joiner_memory[way].append(seen["peak"] / self._size)
        if way == "relay":
            self._forget()
        return float(seen["ended"] - staged["staged"])

    def _forget(self) -> None:
        """Wait until the relay has the whole state, then drop it."""
        everything = f"{self._relay.address}/v1/jobs/bench/checkpoints"
        deadline = time.monotonic() + COMMIT_SECONDS
        while True:
            with urllib.request.urlopen(everything, timeout=COMMIT_SECONDS) as answer:
                found = json.load(answer)["checkpoints"]
            if all(one["state"] == "committed" for one in found):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the relay has {found} after {COMMIT_SECONDS} s")
            time.sleep(0.01)  # the source's upload ends behind the joiner's back
        for one in found:
            request = urllib.request.Request(f"{everything}/{one['id']}", method="DELETE")
            urllib.request.urlopen(request, timeout=COMMIT_SECONDS).close()

    def rate(self, way: str, chunks: int) -> float:
        """Return GB/s of one transfer."""
        return self._size / 1e9 / self.transfer(way, chunks)

    def longest_answer(self) -> float:
        """Return the longest time in seconds without an answer of the relay's event loop during one transfer."""
        with stall_watch(int(self._relay.address.rsplit(":", 1)[1])) as answers:
            self.transfer("relay", 0)
        return answers[-1]

    def relay_memory(self) -> float:
        """Return the peak beyond the memory at its start, as a share of its limit."""
        return (self._relay.peak() - self._relay_before) / RELAY_MEMORY

    def best(self, way: str) -> tuple[int, list[float]]:
        """Return the number of chunks or streams with the highest median, and its samples."""
        found = {chunks: rates for (kind, chunks), rates in self.samples.items() if kind == way}
        chunks = max(found, key=lambda one: p50(found[one]))
        return chunks, found[chunks]


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    turns, size = (2, GIB // 8) if quick else (6, GIB)
    ways = [("relay", 0), ("direct", DIRECT_STREAMS)]
    ways += [("torchft", chunks) for chunks in NUM_CHUNKS] + [("raw", streams) for streams in RAW_STREAMS]
    with contextlib.ExitStack() as stack:
        heal = Heal(ours, theirs, size, log, stack)
        heal.rate("direct", DIRECT_STREAMS)
        fresh = heal.rate("relay", 0)
        for turn in range(turns + 1):
            for way, chunks in ways:
                rate = heal.rate(way, chunks)
                if turn:
                    heal.samples[way, chunks].append(rate)
                print(f"heal {size / GIB:g} GiB, {way} {chunks}: {rate:.2f} GB/s", flush=True)
        answers = [heal.longest_answer() * 1e3 for _ in range(2 if quick else 5)]
        relay_memory = heal.relay_memory()
    return _figures(heal, f"heal {size / GIB:g} GiB", fresh, answers, relay_memory)


def _figures(heal: Heal, label: str, fresh: float, answers: list[float], relay_memory: float) -> list[Figure]:
    their_best, theirs = heal.best("torchft")
    raw_best, raw = heal.best("raw")
    also: dict[str, object] = {
        "num_chunks": {"torchft": their_best},
        "raw_sockets": {"streams": raw_best, "GB/s": raw},
        "first_through_a_fresh_relay": fresh,
    }
    limit = Limit(value=2.0, times_theirs=1.0)
    figures = [
        Figure(
            f"{label}, {name}",
            "GB/s",
            "p50",
            heal.samples[way],
            theirs,
            limit,
            more_is_better=True,
            definition="recv_checkpoint of a staged state over loopback; ours verified, in place; theirs best of all",
            also=also,
        )
        for name, way in (("through the relay", ("relay", 0)), ("direct", ("direct", DIRECT_STREAMS)))
    ]
    figures.append(
        Figure(f"{label}, first through a fresh relay", "GB/s", "mean", [fresh], theirs, more_is_better=True)
    )
    figures += [
        Figure(f"{label}, torchft {chunks} chunks", "GB/s", "p50", (), heal.samples["torchft", chunks])
        for chunks in NUM_CHUNKS
    ]
    figures += [
        Figure(f"{label}, raw sockets, {streams} streams (no side's)", "GB/s", "p50", heal.samples["raw", streams])
        for streams in RAW_STREAMS
    ]
    for way in ("relay", "direct"):
        words = "through the relay" if way == "relay" else "direct"
        for who, of, most in (("joiner", heal.joiner_memory, 1.1), ("source", heal.source_memory, 1.05)):
            name = f"{label}, {words}: memory of the {who}"
            figures.append(Figure(name, "x state", "max", of[way], of["torchft"], Limit(value=most)))
    figures += [
        Figure(
            f"{label}: memory of the relay",
            "x --memory",
            "max",
            [relay_memory],
            limit=Limit(value=1.05),
            definition="peak resident memory beyond what it began with, in shares of its limit of 4 GiB",
        ),
        Figure(
            f"{label}: longest answer of the relay's event loop",
            "ms",
            "max",
            answers,
            definition="the slowest /healthz of each of several transfers, asked every 2 ms by another process",
            also={"mean_ms": mean(answers)},
        ),
    ]
    return figures
