"""Run a job twice: once undisturbed, and once with all its groups and services killed and started again."""

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

from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.histories.report import summary_lines, verdict, violation_lines
from keepstep_cli.demo.demo_run import KEPT_LINES, example
from keepstep_cli.demo.resume_story import Run, summary
from keepstep_cli.running.embedded import lighthouse_program, relay_program
from keepstep_cli.running.launcher import Launcher, replica_programs, stop_on_signals
from keepstep_cli.running.ranks import JobSpec, command_line, free_port
from keepstep_cli.running.supervisor_events import Restarts

STEPS, CHECKPOINT_EVERY, KILL_AT = 60, 5, 33


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


class _Job:
    """One job with a folder for its services and logs, which may be launched several times."""

    def __init__(self, folder: Path, replicas: int, deadline: float) -> None:
        self.run = Run()
        self.lines: deque[str] = deque()
        self._folder = folder
        self._replicas = replicas
        self._deadline = deadline
        folder.mkdir()

    def launch(self, kill_at: int = 0) -> int:
        """Run until the end, or until all groups have committed step ``kill_at``; then kill everything.

        Returns:
            The exit code of the job.
        """
        port = free_port()
        environment = {
            **os.environ,
            "KEEPSTEP_STEP_LOG": str(self._folder / "steps.jsonl"),
            "STEPS": str(STEPS),
            "EVERY": str(CHECKPOINT_EVERY),
        }
        job = JobSpec(
            command=command_line(str(example("durable.py")), ()),
            replicas=self._replicas,
            nproc_per_replica=1,
            lighthouse=f"http://127.0.0.1:{port}",
            job="demo",
            run_id="demo",
            max_restarts=0,
        )
        services = ("lighthouse", "relay")
        programs = [
            lighthouse_program(port, self._folder, environment, ("--min-replicas", str(self._replicas))),
            relay_program(job.lighthouse, environment, self._folder / "relay"),
            *replica_programs(job, environment),
        ]
        killed = False

        def kill_in_time() -> None:
            nonlocal killed
            if kill_at and not killed and self.run.reached(self._replicas, kill_at):
                killed = True
                for name in (*(one.spec.name for one in programs if one.spec.name not in services), *services):
                    launcher.kill(name)
                launcher.stop()
                launcher.stop()

        audience = _Audience(self.run, kill_in_time)
        launcher = Launcher(programs, Restarts(max_restarts=0), audience)
        code = asyncio.run(self._until_the_end(launcher))
        self.lines = audience.lines
        return code

    async def _until_the_end(self, launcher: Launcher) -> int:
        with stop_on_signals(launcher):
            job = asyncio.create_task(launcher.run())
            await asyncio.wait({job}, timeout=max(0.0, self._deadline - time.monotonic()))
            if not job.done():
                launcher.stop()
            return await job


def run_resume_demo(replicas: int, seconds: float, summary_file: Path) -> int:
    """Run the demo. Return 0 if the job resumed, and its losses and weights equal those of the undisturbed job."""
    console, started = Console(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-demo-") as folder:
        undisturbed, killed = (
            _Job(Path(folder) / name, replicas, started + seconds) for name in ("undisturbed", "killed")
        )
        console.print(f"{replicas} groups train {STEPS} steps on handwritten digits, undisturbed.")
        codes = [undisturbed.launch()]
        console.print(f"Once more; SIGKILL to all groups, the lighthouse and the relay after step {KILL_AT}.")
        killed.launch(KILL_AT)
        killed_at = max(killed.run.steps.values(), default=0)
        console.print("All are started again.")
        codes.append(killed.launch())
        history = check_files([Path(folder) / "killed"])
    told = summary(undisturbed.run, killed.run, groups=replicas, killed_at=killed_at)
    told |= {"seconds": round(time.monotonic() - started, 1), "violations": dict(history.counts)}
    summary_file.write_text(json.dumps(told, indent=2) + "\n")
    table = Table(show_header=False)
    for name in ("steps", "killed_at_step", "resumed_at_step", "steps_lost", "losses_compared"):
        table.add_row(name.replace("_", " "), str(told[name]))
    table.add_row("steps with other losses", str(len(told["steps_with_other_losses"])))
    table.add_row("weights bit-identical", "yes" if told["weights_bit_identical"] else "NO")
    console.print(table)
    said = [f"history checked: {'; '.join(summary_lines(history))}: {verdict(history)}", *violation_lines(history)]
    console.print("\n".join(said), markup=False, highlight=False, soft_wrap=True)
    if codes == [0, 0] and told["succeeded"] and history.fine:
        return 0
    console.print(f"the demo failed (exit codes of the jobs: {codes}). Last lines of output:", style="bold red")
    sys.stdout.write("\n".join([*undisturbed.lines, *killed.lines]) + "\n")
    return 1
