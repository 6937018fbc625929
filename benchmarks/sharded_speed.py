"""Measure sharded checkpoints beside Megatron Core 0.16.1: two ranks, each with half of every tensor.

The libraries take turns: both formats of keepstep, then Megatron Core. All write to the same file system, and sync the
files of tensors before a save ends. keepstep also syncs the directory and the mark of a complete checkpoint, and
verifies every byte that it loads, in both formats.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, Limit, p50
from peers import Peer
from sides import HERE, WORK, Side, keepstep_side, megatron_side

RANKS = 2
GIB = 1 << 30
TENSORS = 256
ROUNDS = 3
SMALL_ROUNDS = 2
"""Megatron Core needs seconds for each save and load of many tensors."""
SMALL_TENSORS = 5_000
SMALL_BYTES = 16
"""Of one of the many tensors, over all ranks."""
FORMS = {"keepstep": "keepstep", "keepstep, torch_dist": "torch_dist", "megatron": "torch_dist"}
"""The backend that each side writes, in the order of their turns."""

Samples = dict[str, dict[str, list[float]]]
"""Seconds of the slowest rank, by action and by the name in ``FORMS``."""


class Ranks:
    """The ranks of one library."""

    def __init__(self, side: Side, folder: str, log: Path, stack: contextlib.ExitStack) -> None:
        commands = [
            [side.python, HERE / "sharded_ends.py", side.name, rank, RANKS, f"{folder}/{side.name}.store"]
            for rank in range(RANKS)
        ]
        self._peers = [Peer(side, command, log, stack) for command in commands]
        for peer in self._peers:
            peer.answer("ready")

    def tell(self, line: str) -> list[str]:
        """Return the answer of each rank."""
        for peer in self._peers:
            peer.tell(line)
        return [peer.answer()[0] for peer in self._peers]

    def seconds(self, line: str) -> float:
        """Return the seconds of the slowest rank."""
        return max(map(float, self.tell(line)))


def measure(
    libraries: dict[str, Ranks], folder: str, size: int, tensors: int, actions: Sequence[str], rounds: int
) -> Samples:
    """Save and load a state in turns. The first turn fills caches."""
    found: Samples = {action: defaultdict(list) for action in actions}
    for ranks in libraries.values():
        ranks.tell(f"state {size} {tensors}")
    for turn in range(rounds + 1):
        for name, backend in FORMS.items():
            ranks = libraries[name.partition(",")[0]]
            for action in actions:
                place = f"{folder}/{'planned' if action == 'plan' else 'saved'}"
                seconds = ranks.seconds(f"{action} {place}" + f" {backend}" * (action != "load"))
                if turn:
                    found[action][name].append(seconds)
            if not turn and set(ranks.tell("check")) != {"equal"}:
                raise RuntimeError(f"{name} loaded other values than it saved")
            for one in ("planned", "saved"):
                shutil.rmtree(f"{folder}/{one}", ignore_errors=True)
        print(f"{tensors} tensors, {size >> 10} KiB: turn {turn} of {rounds}", flush=True)
    return found


def run(*, quick: bool, log: Path) -> list[Figure]:
    size, many, rounds, small_rounds = (
        (GIB // 8, SMALL_TENSORS // 5, 2, 1) if quick else (GIB, SMALL_TENSORS, ROUNDS, SMALL_ROUNDS)
    )
    peer = megatron_side()
    with tempfile.TemporaryDirectory(dir=WORK) as folder, contextlib.ExitStack() as stack:
        libraries = {side.name: Ranks(side, folder, log, stack) for side in (keepstep_side(), peer)}
        small = measure(libraries, folder, many * SMALL_BYTES, many, ("plan", "save", "load"), small_rounds)
        large = measure(libraries, folder, size, TENSORS, ("save", "load"), rounds)
    figures = []
    beside = f"megatron-core {peer.version().split()[0]}"
    for action, samples in large.items():
        rates = {name: [size / 1e9 / one for one in seconds] for name, seconds in samples.items()}
        figures += [
            Figure(
                f"sharded {action} of {size >> 20} MiB on {RANKS} ranks, {name}",
                "GB/s",
                "p50",
                rates[name],
                rates["megatron"],
                Limit(times_theirs=1.0),
                more_is_better=True,
                definition="the slowest rank, files synced",
                beside=beside,
            )
            for name in rates
            if name != "megatron"
        ]
    what = {
        "plan": "until the request of a background save is there: validated and planned; keepstep has copied them too",
        "save": "validated, planned, and written",
        "load": "validated, planned, and read",
    }
    for action, samples in small.items():
        figures += [
            Figure(
                f"{action} of {many:,} sharded tensors on {RANKS} ranks, {name}",
                "ms",
                "p50",
                [1e3 * one for one in samples[name]],
                [1e3 * one for one in samples["megatron"]],
                Limit(times_theirs=1.0),
                definition=f"{what[action]}; the slowest rank",
                beside=beside,
            )
            for name in samples
            if name != "megatron"
        ]
    for figure in figures:
        print(f"{figure.name}: {p50(figure.ours):.3g} beside {p50(figure.theirs):.3g} {figure.unit}", flush=True)
    return figures
