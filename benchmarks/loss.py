"""Measure the loss of a small language model after equally many tokens with each codec of DiLoCo, and the bytes sent.

Two groups, gloo over loopback, no faults. Without torchft, which has no codec on a CPU.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from figures import Figure
from loss_trainer import BATCH, CODECS, CONTEXT, OUTER
from sides import HERE, keepstep_side, lighthouse, stop

GROUPS = 2
SYNC_EVERY = 10
OUTER_STEPS, QUICK_OUTER_STEPS = 30, 10

Found = dict[tuple[str, str], tuple[float, float]]
"""The loss, and the bytes that a group sent in an outer step, by outer optimizer and codec."""


def measure(steps: int, log: Path) -> Found:
    found: Found = {}
    side = keepstep_side()
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(lighthouse(side, min_replicas=GROUPS, log=log)).address
        trainers = []
        for group in range(GROUPS):
            command = [side.python, HERE / "loss_trainer.py", "--lighthouse", address, "--group", str(group)]
            command += ["--groups", str(GROUPS), "--steps", str(steps), "--sync-every", str(SYNC_EVERY)]
            with log.open("ab") as errors:
                trainer = subprocess.Popen(
                    command,
                    env=side.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if group == 0 else subprocess.DEVNULL,
                    stderr=errors,
                    text=True,
                )
            stack.callback(stop, trainer)
            trainers.append(trainer)
        for line in trainers[0].stdout:
            outer, codec, loss, sent, seconds = line.rstrip().split("\t")
            found[outer, codec] = (float(loss), int(sent) / steps)
            gap, kilobytes = float(loss) - found[outer, "none"][0], int(sent) / steps / 1e3
            print(
                f"outer {outer}, {codec}: loss {float(loss):.3f}, gap {gap:+.3f}, {kilobytes:.1f} kB an outer step "
                f"({float(seconds):.0f} s)",
                flush=True,
            )
        if any(trainer.wait(60) for trainer in trainers) or len(found) < len(OUTER) * len(CODECS):
            raise RuntimeError(f"a trainer ended before its last run; see {log}")
    return found


def run(*, quick: bool, log: Path) -> list[Figure]:
    steps = QUICK_OUTER_STEPS if quick else OUTER_STEPS
    tokens = GROUPS * steps * SYNC_EVERY * BATCH * CONTEXT
    found = measure(steps, log)
    return [
        Figure(
            f"loss after {tokens / 1e6:.2g} M tokens, outer {outer}, {codec}",
            "nats per byte",
            "p50",
            [loss],
            [found[outer, "none"][0]],
            beside="no codec",
            definition="of held-out text, after training two groups with DiLoCo",
            also={"gap": loss - found[outer, "none"][0], "bytes_sent_in_an_outer_step": sent},
        )
        for (outer, codec), (loss, sent) in found.items()
    ]
