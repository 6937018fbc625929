"""Measure the cost of a step over plain torch DistributedDataParallel: two groups, gloo, no faults.

Plain DDP, torchft, and keepstep run one after another, three times over. The figure of a run is the median of 200 steps
of group 0, after a warm-up. The added time is that figure minus the one of plain DDP of the same turn.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from figures import Figure, Limit, p50
from peers import run_to_end
from sides import HERE, Side, free_port, lighthouse

GROUPS = 2
WARM_UP = 50
STEPS = 200
REPEATS = 3


def measure(side: Side, library: str, model: str, steps: int, log: Path) -> list[float]:
    """Return the milliseconds of each step of group 0."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address = ""
        if library != "plain":
            address = stack.enter_context(lighthouse(side, min_replicas=GROUPS, log=log)).address
        command = [side.python, HERE / "trainer.py", "--library", library, "--lighthouse", address, "--model", model]
        command += ["--groups", GROUPS, "--min-replicas", GROUPS, "--steps", steps + WARM_UP]
        command += ["--store-port", free_port()]
        commands = [[*command, "--group", group, "--out", Path(folder) / str(group)] for group in range(GROUPS)]
        run_to_end(side, commands, log, library)
        lines = (Path(folder) / "0").read_text().splitlines()[WARM_UP:]
        return [float(line.split()[3]) * 1e3 for line in lines]


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    figures = []
    for model, title in (("tiny", "tiny model"), ("medium", "2.1 M parameters")):
        medians: dict[str, list[float]] = {"plain": [], theirs.name: [], ours.name: []}
        samples: dict[str, list[float]] = {"plain": [], theirs.name: [], ours.name: []}
        for _ in range(1 if quick else REPEATS):
            for side, library in ((ours, "plain"), (theirs, theirs.name), (ours, ours.name)):
                print(f"step cost, {title}: {library} ...", flush=True)
                steps = measure(side, library, model, STEPS, log)
                samples[library] += steps
                medians[library].append(p50(steps))
        figures += _figures(title, medians, samples, ours.name, theirs.name, tiny=model == "tiny")
    return figures


def _figures(
    title: str,
    medians: dict[str, list[float]],
    samples: dict[str, list[float]],
    ours: str,
    theirs: str,
    *,
    tiny: bool,
) -> list[Figure]:
    def added(library: str) -> list[float]:
        return [with_it - plain for with_it, plain in zip(medians[library], medians["plain"], strict=True)]

    limit = 0.2 if tiny else 0.03 * p50(medians["plain"])
    also: dict[str, object] = {"p50_of_each_run_ms": medians, "plain_p50_ms": p50(samples["plain"])}
    name = f"step, {title}"
    return [
        Figure(name, "ms", "p50", samples[ours], samples[theirs], definition="one step of group 0, all in"),
        Figure(
            f"{name}, added to plain DDP ({p50(samples['plain']):.2f} ms)",
            "ms",
            "p50",
            added(ours),
            added(theirs),
            Limit(value=limit),
            definition="median of a run minus the median of plain DDP's run of the same turn (one sample a turn)",
            also=also,
        ),
    ]
