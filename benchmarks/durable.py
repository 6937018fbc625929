"""Measure what a durable checkpoint of every step costs the training thread, with a relay's memory on loopback.

Two jobs of one group (``durable_trainer.py``) take turns in blocks of ``BLOCK_STEPS`` steps: one with
``durable_every=1``, one without checkpoints. Their states have 64 MB or 1 GB, of which each step changes a part of
every chunk. A step waits for ``STEP_SECONDS`` in place of an accelerator. The figure is the difference of the medians,
as a share of the step without. A step that begins while the upload before it still runs waits for it; with
``durable_newest_wins`` it does not. The first step of a block has no upload before it, and does not count.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from figures import Figure, Limit, p50
from peers import Peer
from sides import HERE, keepstep_side, lighthouse, relay

STATES = {"64 MB": (64 << 20, (False,)), "1 GB": (1 << 30, (False, True))}
"""Bytes, and whether ``durable_newest_wins`` is set: uploads of 64 MB do not take longer than a step."""
STEP_SECONDS = 0.2
BLOCK_STEPS = 6
BLOCKS, QUICK_BLOCKS = 4, 3
WARM_UP_STEPS = 4
"""Of each job, in which memory is allocated."""
Times = list[tuple[float, float]]
"""Milliseconds of each step; and those in which the training thread did not wait for the accelerator."""


class Job:
    """One job, with a lighthouse of its own."""

    def __init__(self, size: int, log: Path, stack: contextlib.ExitStack, **variables: str) -> None:
        side = keepstep_side()
        server = stack.enter_context(lighthouse(side, min_replicas=1, log=log))
        settings = {"KEEPSTEP_LIGHTHOUSE": server.address, **variables}
        words = ["env", *(f"{name}={value}" for name, value in settings.items()), side.python]
        self._peer = Peer(side, [*words, HERE / "durable_trainer.py", size, STEP_SECONDS], log, stack)
        self.times: Times = []

    def ready(self) -> None:
        self._peer.answer("ready")
        self._peer.tell(f"steps {WARM_UP_STEPS}")
        self._peer.answer("done")

    def block(self) -> None:
        self._peer.tell(f"steps {BLOCK_STEPS}")
        numbers = [float(one) for one in self._peer.answer("done")]
        self.times += list(zip(numbers[::2], numbers[1::2], strict=True))[1:]


def measure(size: int, blocks: int, log: Path, *, newest_wins: bool) -> tuple[Times, Times]:
    """Return the times of steps without and with a checkpoint."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(relay(keepstep_side(), log, "--memory", "8GiB", "--memory-checkpoints", "2"))
        wins = {"KEEPSTEP_DURABLE_NEWEST_WINS": "1"} if newest_wins else {}
        due = Job(size, log, stack, KEEPSTEP_DURABLE_EVERY="1", KEEPSTEP_DURABLE_RELAYS=store.address, **wins)
        plain = Job(size, log, stack)
        for one in (due, plain):
            one.ready()
        for _ in range(blocks):
            plain.block()
            due.block()
        return plain.times, due.times


def run(*, quick: bool, log: Path) -> list[Figure]:
    figures = []
    for name, (size, ways) in STATES.items():
        for newest_wins in ways:
            how = f"{name}{', durable_newest_wins' if newest_wins else ''}"
            print(f"durable checkpoints of {how} in every step ...", flush=True)
            plain, due = measure(size, QUICK_BLOCKS if quick else BLOCKS, log, newest_wins=newest_wins)
            without = p50([took for took, _ in plain])
            figures.append(
                Figure(
                    f"durable_every=1, {how}: added to a step of {without:.0f} ms",
                    *("%", "p50", [100 * (took / without - 1) for took, _ in due]),
                    limit=Limit(value=1.0),
                    definition="beside the median step of a job without checkpoints, block by block in the same run",
                    also={"plain_ms": plain, "due_ms": due},
                )
            )
    return figures
