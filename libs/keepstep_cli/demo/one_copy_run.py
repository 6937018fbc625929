"""Train a model that exists once, twice: with its ranks killed one after the other, and undisturbed.

The job that is killed comes first, and trains until all kills are survived. The other one trains as many steps. So
nothing depends on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keepstep_cli.demo.demo_run import KEPT_LINES, LAST_STEPS, UNTIL_TOLD, example, write_steps
from keepstep_cli.demo.one_copy_story import Run, summary
from keepstep_cli.running.embedded import lighthouse_program
from keepstep_cli.running.launcher import Launcher, replica_programs, stop_on_signals
from keepstep_cli.running.ranks import JobSpec, command_line, free_port
from keepstep_cli.running.supervisor_events import Restarts

RANKS = 4
STEPS_BETWEEN, SHORT_STEPS = 100, 30
"""Minimum number of steps before and after each kill, and that with one kill only."""
STEP_PAUSE_SECONDS = 0.02
"""After each step of the job that is killed: a process that starts again needs the processors."""


class _Training:
    """One job: hears its trainers, and kills them in time."""

    def __init__(self, folder: Path, console: Console, started: float, kills: int) -> None:
        self.run = Run(RANKS)
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._steps_file = folder / "steps"
        self._folder = folder
        self._console = console
        self._started = started
        self._kills = kills
        self._between = STEPS_BETWEEN if kills > 1 else SHORT_STEPS
        self._launcher: Launcher | None = None
        self._told = False
        folder.mkdir()

    def train(self, steps: int, deadline: float) -> None:
        """Train until the number of steps, or with kills until all are survived.

        Args:
            steps: without kills.
            deadline: ends the job, on the monotonic clock.
        """
        write_steps(self._steps_file, UNTIL_TOLD if self._kills else steps)
        port, spares = free_port(), 1 if self._kills else 0
        environment = {
            **os.environ,
            "STEPS": str(self._steps_file),
            "EVERY": "1",
            "PAUSE": str(STEP_PAUSE_SECONDS if self._kills else 0),
        }
        job = JobSpec(
            command=command_line(str(example("one_copy.py")), ()),
            replicas=RANKS,
            spares=spares,
            spares_in_job=spares,
            max_restarts=self._kills + 3,
            nproc_per_replica=1,
            lighthouse=f"http://127.0.0.1:{port}",
            job="demo",
            run_id="demo",
            imports=self._folder / "imports" if self._kills else None,
        )
        programs = [
            lighthouse_program(port, self._folder, environment, ("--min-replicas", str(RANKS))),
            *replica_programs(job, environment),
        ]
        self._launcher = Launcher(programs, Restarts(max_restarts=job.max_restarts), self, imports=job.imports)
        asyncio.run(_until_the_end(self._launcher, deadline))

    def line(self, group: str, rank: int, text: str, *, error: bool) -> None:  # noqa: ARG002 - required by Audience
        """Hear a line of a trainer."""
        now = time.monotonic()
        self.lines.append(f"[{group}] {text}")
        self.run.heard(group, text, now)
        if self._kills and self._launcher is not None:
            if victim := self.run.next_kill(self._between, self._kills):
                self.run.killed(victim, now)
                self._launcher.kill(victim)
            elif not self._told and self.run.over(self._between, self._kills):
                self._told = True
                write_steps(self._steps_file, self.run.step + LAST_STEPS)
        for sentence in self.run.happenings:
            self._console.print(f"{now - self._started:6.2f} s  {sentence}", highlight=False)
        self.run.happenings.clear()

    def note(self, group: str, sentence: str) -> None:
        """Keep a line of the supervisor."""
        self.lines.append(f"[{group}] {sentence}")


def run_one_copy_demo(kills: int, seconds: float, summary_file: Path) -> int:
    """Run the demo. Return 0 if the job survived all kills, and its shards equal those of the undisturbed job.

    Args:
        kills: number of kills.
        seconds: time limit of both jobs together.
        summary_file: gets the summary, as JSON.
    """
    console, started = Console(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-demo-") as folder:
        killed, undisturbed = (
            _Training(Path(folder) / name, console, started, number)
            for name, number in (("killed", kills), ("undisturbed", 0))
        )
        console.print(
            f"{RANKS} ranks train one network on handwritten digits, sharded with FSDP2; a spare stands by. "
            f"{kills} of them will be killed with SIGKILL."
        )
        killed.train(UNTIL_TOLD, started + seconds)
        if killed.run.end:
            console.print(f"The same {killed.run.end} steps, undisturbed.")
            undisturbed.train(killed.run.end, started + seconds)
    told = summary(undisturbed.run, killed.run, kills=kills) | {"seconds": round(time.monotonic() - started, 1)}
    summary_file.write_text(json.dumps(told, indent=2) + "\n")
    times = [one.seconds for one in killed.run.kills if one.seconds is not None]
    table = Table(show_header=False)
    table.add_row("steps committed", str(told["steps"]))
    table.add_row("kills survived", f"{told['kills_survived']} of {kills}")
    table.add_row("from kill to next commit, max", f"{max(times):.2f} s" if times else "none")
    table.add_row("weights bit-identical to undisturbed", "yes" if told["shards_bit_identical"] else "NO")
    console.print(table)
    if told["succeeded"]:
        return 0
    console.print("the demo failed. Last lines of output:", style="bold red")
    sys.stdout.write("\n".join([*killed.lines, *undisturbed.lines]) + "\n")
    return 1


async def _until_the_end(launcher: Launcher, deadline: float) -> None:
    with stop_on_signals(launcher):
        job = asyncio.create_task(launcher.run())
        await asyncio.wait({job}, timeout=max(0.0, deadline - time.monotonic()))
        if not job.done():
            launcher.stop()
        await job
