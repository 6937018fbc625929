"""Measure the cost of a step of a sharded model over plain FSDP2: one group of two ranks, gloo, no faults.

Plain FSDP2, torchft, and keepstep run one after another, five times over. The figure of a run is the median of 120
steps of rank 0, after a warm-up. The added share is that figure divided by the one of plain FSDP2 of the same turn.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path

from figures import Figure, Limit, p50
from sides import HERE, Side, free_port, lighthouse, stop

RANKS = 2
WARM_UP = 20
STEPS = 120
REPEATS = 5
RUN_TIMEOUT = 300.0
LIMIT_PERCENT = 5.0


def measure(side: Side, library: str, steps: int, log: Path) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each step of rank 0, and those of its processor time."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        out = Path(folder) / "steps"
        command = [side.python, HERE / "hsdp_trainer.py", "--library", library, "--ranks", str(RANKS), "--out", out]
        command += ["--store-port", str(free_port()), "--steps", str(steps + WARM_UP)]
        if library != "plain":
            command += ["--lighthouse", stack.enter_context(lighthouse(side, min_replicas=1, log=log)).address]
        ranks = []
        for rank in range(RANKS):
            with log.open("ab") as errors:
                started = subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    env=side.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            stack.callback(stop, started)
            ranks.append(started)
        for one in ranks:
            if one.wait(RUN_TIMEOUT) != 0:
                raise RuntimeError(f"a rank of {library} ended with {one.returncode}; see {log}")
        lines = [line.split() for line in out.read_text().splitlines()[WARM_UP:]]
        return [float(line[0]) * 1e3 for line in lines], [float(line[1]) * 1e3 for line in lines]


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    medians: dict[str, list[float]] = {"plain": [], theirs.name: [], ours.name: []}
    samples: dict[str, list[float]] = {"plain": [], theirs.name: [], ours.name: []}
    processor: dict[str, list[float]] = {"plain": [], theirs.name: [], ours.name: []}
    for _ in range(1 if quick else REPEATS):
        for side, library in ((ours, "plain"), (theirs, theirs.name), (ours, ours.name)):
            print(f"step of a sharded model: {library} ...", flush=True)
            steps, of_processor = measure(side, library, STEPS // (4 if quick else 1), log)
            samples[library] += steps
            medians[library].append(p50(steps))
            processor[library].append(p50(of_processor))

    def added(library: str) -> list[float]:
        return [100 * (own / plain - 1) for own, plain in zip(medians[library], medians["plain"], strict=True)]

    name = "HSDP step, 4.2 M parameters, 2 ranks"
    return [
        Figure(name, "ms", "p50", samples[ours.name], samples[theirs.name], definition="one step of rank 0, all in"),
        Figure(
            f"{name}, added to plain FSDP2 ({p50(samples['plain']):.2f} ms)",
            "%",
            "p50",
            added(ours.name),
            added(theirs.name),
            Limit(value=LIMIT_PERCENT),
            definition="median of a run over the median of plain FSDP2's run of the same turn (one sample a turn)",
            also={"p50_of_each_run_ms": medians, "p50_of_processor_time_of_each_run_ms": processor},
        ),
    ]
