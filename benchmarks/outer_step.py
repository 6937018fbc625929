"""Measure the outer step of DiLoCo, and its bytes on the wire: two groups, gloo over loopback, no faults.

The time of the call of the inner optimizer that takes the outer step, of group 0: quorum, pseudo-gradients, all-reduce,
commit, outer optimizer, and a step of SGD. torchft and keepstep take turns, then keepstep's codecs follow: torchft has
none on a CPU. The bytes are those that the loopback interface sends in an outer step, for each group.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from pathlib import Path

from figures import Figure, p50
from peers import run_to_end
from sides import HERE, Side, lighthouse

GROUPS = 2
WARM_UP = 2
STEPS = {"1M": 40, "100M": 6}
CODECS = ("quantized", "top-k", "two-bit")


def measure(side: Side, model: str, steps: int, log: Path, *flags: str) -> tuple[list[float], float]:
    """Return the milliseconds of each outer step of group 0, and the median of MB sent by each group."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address = stack.enter_context(lighthouse(side, min_replicas=GROUPS, log=log)).address
        command = [side.python, HERE / "outer_step_trainer.py", "--library", side.name, "--lighthouse", address]
        command += ["--groups", GROUPS, "--model", model, "--steps", steps + WARM_UP, *flags]
        commands = [[*command, "--group", group, "--out", f"{folder}/{group}"] for group in range(GROUPS)]
        run_to_end(side, commands, log, side.name)
        lines = [line.split() for line in Path(folder, "0").read_text().splitlines()]
        sent = [int(after) - int(before) for (_, before), (_, after) in itertools.pairwise(lines)]
        return [float(seconds) * 1e3 for seconds, _ in lines[WARM_UP:]], p50(sent[WARM_UP:]) / GROUPS / 1e6


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    figures = []
    for model, steps in list(STEPS.items())[: 1 if quick else None]:
        for buckets in ((), ("--buckets",)):
            times: dict[str, list[float]] = {ours.name: [], theirs.name: []}
            sent: dict[str, list[float]] = {ours.name: [], theirs.name: []}
            for side in (theirs, ours):
                print(f"outer step, {model}: {side.name} {' '.join(buckets)} ...", flush=True)
                milliseconds, megabytes = measure(side, model, steps, log, *buckets)
                times[side.name] += milliseconds
                sent[side.name].append(megabytes)
            name = f"outer step, {model} parameters{', in buckets' if buckets else ''}"
            figures.append(Figure(name, "ms", "p50", times[ours.name], times[theirs.name]))
            figures.append(Figure(f"{name}, sent", "MB", "p50", sent[ours.name], sent[theirs.name]))
        for codec in CODECS:
            print(f"outer step, {model}: {codec} ...", flush=True)
            milliseconds, megabytes = measure(ours, model, max(2, steps // 3), log, "--buckets", "--codec", codec)
            figures.append(Figure(f"outer step, {model} parameters, {codec}", "ms", "p50", milliseconds))
            figures.append(Figure(f"outer step, {model} parameters, {codec}, sent", "MB", "p50", [megabytes]))
    return figures
