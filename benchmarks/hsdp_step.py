"""Measure the cost of a step of a sharded model over plain FSDP2: one group of two ranks, gloo, no faults.

Managed and plain steps alternate within one run (see ``hsdp_trainer.py``). Runs of torchft and keepstep take turns,
twice. The figure of a run is its median managed step divided by its median plain step.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from figures import Figure, Limit, p50
from peers import run_to_end
from sides import HERE, Side, free_port, lighthouse

RANKS = 2
WARM_UP = 24
STEPS = 160
"""Of both kinds."""
REPEATS = 2
LIMIT_PERCENT = 5.0


def measure(side: Side, steps: int, log: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the milliseconds of each step of rank 0, and those of its processor time, by the kind of step."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        out = Path(folder) / "steps"
        command = [side.python, HERE / "hsdp_trainer.py", "--library", side.name, "--ranks", str(RANKS), "--out", out]
        command += ["--store-port", str(free_port()), "--steps", str(steps + WARM_UP)]
        command += ["--lighthouse", stack.enter_context(lighthouse(side, min_replicas=1, log=log)).address]
        run_to_end(side, [[*command, "--rank", rank] for rank in range(RANKS)], log, side.name)
        kinds: dict[str, list[tuple[float, float]]] = {"plain": [], "managed": []}
        for line in out.read_text().splitlines()[WARM_UP:]:
            kind, seconds, of_processor = line.split()
            kinds[kind].append((float(seconds) * 1e3, float(of_processor) * 1e3))
        return kinds


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    added: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    added_processor: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    managed: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    plain: list[float] = []
    for _ in range(1 if quick else REPEATS):
        for side in (theirs, ours):
            print(f"step of a sharded model: {side.name} ...", flush=True)
            kinds = measure(side, STEPS // (4 if quick else 1), log)
            of_plain, of_managed = (list(zip(*kinds[kind], strict=True)) for kind in ("plain", "managed"))
            added[side.name].append(100 * (p50(of_managed[0]) / p50(of_plain[0]) - 1))
            added_processor[side.name].append(100 * (p50(of_managed[1]) / p50(of_plain[1]) - 1))
            managed[side.name] += of_managed[0]
            plain += of_plain[0]
    name = "HSDP step, 4.2 M parameters, 2 ranks"
    definition = "one step of rank 0, all in"
    return [
        Figure(name, "ms", "p50", managed[ours.name], managed[theirs.name], definition=definition),
        Figure(
            f"{name}, added to plain FSDP2 ({p50(plain):.2f} ms)",
            "%",
            "p50",
            added[ours.name],
            added[theirs.name],
            Limit(value=LIMIT_PERCENT),
            definition="median managed step of a run over its median plain step (one sample a run)",
            also={"added_processor_time_percent": added_processor},
        ),
    ]
