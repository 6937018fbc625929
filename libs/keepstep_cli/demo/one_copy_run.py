"""Train a model that exists once, twice: undisturbed, and with its ranks killed one after the other."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keepstep_cli.demo.demo_run import KEPT_LINES, example
from keepstep_cli.demo.one_copy_story import Run, summary
from keepstep_cli.running.embedded import lighthouse_program
from keepstep_cli.running.launcher import Launcher, replica_programs, stop_on_signals
from keepstep_cli.running.ranks import JobSpec, command_line, free_port
from keepstep_cli.running.supervisor_events import Restarts

RANKS, SPARES = 4, 1
STEPS_BETWEEN = 100
"""Between two kills, of the ranks that train."""


class _Audience:
    def __init__(self, run: Run, on_line: Callable[[], None]) -> None:
        self._run = run
        self._on_line = on_line
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    def line(self, group: str, rank: int, text: str, *, error: bool) -> None:  # noqa: ARG002 - required by Audience
        self.lines.append(f"[{group}] {text}")
        self._run.heard(group, text)
        self._on_line()

    def note(self, group: str, sentence: str) -> None:
        self.lines.append(f"[{group}] {sentence}")


def run_one_copy_demo(kills: int, seconds: float, summary_file: Path) -> int:
    """Run the demo. Return 0 if the job survived all kills with the shards of the undisturbed job.

    Args:
        kills: number of kills.
        seconds: time limit of both jobs together.
        summary_file: gets the summary, as JSON.
    """
    console, started = Console(), time.monotonic()
    steps = STEPS_BETWEEN * (kills + 2)
    console.print(f"{RANKS} ranks train {steps} steps on handwritten digits with FSDP2, undisturbed.")
    first, lines = _train(Run(RANKS), steps, 0, started + seconds, console)
    console.print(f"Once more; SIGKILL to {kills} of them, one after the other. A spare takes each place.")
    second, more = _train(Run(RANKS), steps, kills, started + seconds, console)
    told = summary(first, second, kills=kills) | {"seconds": round(time.monotonic() - started, 1)}
    summary_file.write_text(json.dumps(told, indent=2) + "\n")
    table = Table(show_header=False)
    table.add_row("steps", str(told["steps"]))
    table.add_row("ranks killed", f"{len(told['kills'])} of {kills}")
    table.add_row("committed steps lost", "0" if second.end == first.end and second.end else "unknown")
    table.add_row("final weights", "bit-identical" if told["shards_bit_identical"] else "DIFFERENT")
    console.print(table)
    if told["succeeded"]:
        return 0
    console.print("the demo failed. Last lines of output:", style="bold red")
    sys.stdout.write("\n".join([*lines, *more]) + "\n")
    return 1


def _train(run: Run, steps: int, kills: int, deadline: float, console: Console) -> tuple[Run, deque[str]]:
    with tempfile.TemporaryDirectory(prefix="keepstep-demo-") as folder:
        port = free_port()
        environment = {**os.environ, "STEPS": str(steps)}
        job = JobSpec(
            command=command_line(str(example("one_copy.py")), ()),
            replicas=RANKS,
            spares=SPARES,
            max_restarts=kills,
            nproc_per_replica=1,
            lighthouse=f"http://127.0.0.1:{port}",
            job="demo",
            run_id="demo",
        )
        programs = [
            lighthouse_program(port, Path(folder), environment, ("--min-replicas", str(RANKS))),
            *replica_programs(job, environment),
        ]

        def kill_in_time() -> None:
            if victim := run.next_kill(STEPS_BETWEEN, kills):
                run.killed(victim)
                console.print(f"step {run.step}: kill -9 {victim}, rank {run.kills[-1][1]}")
                launcher.kill(victim)

        audience = _Audience(run, kill_in_time)
        launcher = Launcher(programs, Restarts(max_restarts=kills), audience)
        asyncio.run(_until_the_end(launcher, deadline))
    return run, audience.lines


async def _until_the_end(launcher: Launcher, deadline: float) -> None:
    with stop_on_signals(launcher):
        job = asyncio.create_task(launcher.run())
        await asyncio.wait({job}, timeout=max(0.0, deadline - time.monotonic()))
        if not job.done():
            launcher.stop()
        await job
