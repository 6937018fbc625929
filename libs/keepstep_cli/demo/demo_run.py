"""Run the demo: a lighthouse, a relay, and replica groups under the supervisor of ``keepstep run``, and kill them.

Trainers report their steps in the step log (``KEEPSTEP_STEP_LOG``) and on standard output; ``demo_story`` decides what
to do next. They train until the number in the steps file, which is written after the last kill was survived. At the end
all logs are checked as ``keepstep check-history`` does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from rich.console import Console

from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.histories.report import summary_lines, verdict, violation_lines
from keepstep_cli.demo.demo_story import LIGHTHOUSE, Story
from keepstep_cli.demo.demo_view import View, final_table, make_view
from keepstep_cli.running.embedded import lighthouse_program, relay_program
from keepstep_cli.running.launcher import Launcher, replica_programs, stop_on_signals
from keepstep_cli.running.ranks import JobSpec, command_line, free_port
from keepstep_cli.running.supervisor_events import Restarts
from keepstep_mesh.net.event_loop import cancelled
from keepstep_mesh.protocol.names import name_of

SETTLE_SECONDS = 0.75
"""Time for which all groups train together before the next kill."""
UNTIL_TOLD = 10**9
LAST_STEPS = 100
"""Minimum number of steps after the last kill: every group must read the number before it gets there."""
KEPT_LINES = 80


def example(name: str) -> Path:
    """Return a file of examples/ in the repository, or the same file of an installed package."""
    in_repository = Path(__file__).resolve().parents[3] / "examples" / name
    return in_repository if in_repository.exists() else Path(__file__).resolve().parents[1] / name


class StepLogReader:
    """Pass new lines of the step log to the story."""

    def __init__(self, path: Path, story: Story) -> None:
        path.touch()
        self._file = path.open("rb")
        self._rest = b""
        self._story = story

    def read(self) -> None:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            entry = json.loads(line)
            name = name_of(entry["replica_id"])
            self._story.heard(name if name in self._story.groups else f"r{name}", entry)

    def close(self) -> None:
        self._file.close()


class DemoAudience:
    """Pass losses and results in the trainers' output to the story; keep the last lines for a failure."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    def line(self, group: str, rank: int, text: str, *, error: bool) -> None:  # noqa: ARG002 - required by Audience
        if match := re.fullmatch(r"step \d+ loss (\S+)", text):
            self._story.learnt(group, float(match[1]))
            return
        self.lines.append(f"[{group}] {text}")
        if match := re.fullmatch(r"step \d+ test accuracy (\S+) weights (\w+)", text):
            self._story.ended(group, float(match[1]), match[2])

    def note(self, group: str, sentence: str) -> None:
        self.lines.append(f"[{group}] {sentence}")
        if group == "run":
            self._story.noted(sentence, time.time())
        elif sentence.startswith("restart "):
            self._story.restarted(group)
        elif sentence.startswith("rank "):
            self._story.died(group, sentence, time.time())


async def direct(
    launcher: Launcher, story: Story, log: StepLogReader, view: View, steps_file: Path, warm_wait: float
) -> None:
    """Update the view, kill, and end the training, until cancelled.

    Args:
        launcher, story, log, view: of the demo.
        steps_file: gets the last step.
        warm_wait: seconds in which killed groups may begin to start warm, before the first kill.
    """
    told, until = False, time.monotonic() + warm_wait
    while True:
        log.read()
        view.show(story)
        ready = launcher.warm is None or launcher.warm.settled() or story.kills or time.monotonic() > until
        if ready and (victim := story.next_kill(time.time())):
            story.killed(victim, time.time())
            launcher.kill(victim)
        if not told and story.over(time.time()):
            told = True
            more = max(LAST_STEPS, round(2 * story.steps_per_second()))
            write_steps(steps_file, story.step + more)
        await asyncio.sleep(0.05)


def write_steps(steps_file: Path, steps: int) -> None:
    part = steps_file.with_suffix(".part")
    part.write_text(str(steps))
    part.rename(steps_file)


async def _run(
    launcher: Launcher, story: Story, log: StepLogReader, view: View, steps_file: Path, seconds: float
) -> int:
    director = asyncio.create_task(direct(launcher, story, log, view, steps_file, seconds / 2))
    try:
        with stop_on_signals(launcher):
            job = asyncio.create_task(launcher.run())
            await asyncio.wait({job, director}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                launcher.stop()
            return await job
    finally:
        await cancelled(director)
        log.read()


def run_demo(replicas: int, kills: int, seconds: float, summary_file: Path) -> int:
    """Run the demo; return 0 if everything that was killed came back and all groups ended with equal weights."""
    console = Console()
    started = time.monotonic()
    names = [f"r{group}" for group in range(replicas)]
    victims = list(itertools.islice(itertools.cycle([names[0], LIGHTHOUSE, *names[1:]]), kills))
    story = Story(names, victims, SETTLE_SECONDS)
    audience = DemoAudience(story)
    with tempfile.TemporaryDirectory(prefix="keepstep-demo-") as folder:
        steps_file, step_log = Path(folder) / "steps", Path(folder) / "steps.jsonl"
        write_steps(steps_file, UNTIL_TOLD)
        port = free_port()
        environment = {**os.environ, "KEEPSTEP_STEP_LOG": str(step_log)}
        job = JobSpec(
            command=command_line(str(example("train_ddp.py")), ("--steps", str(steps_file))),
            replicas=replicas,
            nproc_per_replica=1,
            lighthouse=f"http://127.0.0.1:{port}",
            job="demo",
            run_id="demo",
            max_restarts=kills + 3,
            imports=Path(folder) / "imports",
        )
        programs = [
            lighthouse_program(port, Path(folder), environment),
            relay_program(job.lighthouse, environment),
            *replica_programs(job, environment),
        ]
        console.print(
            f"{replicas} replica groups train on handwritten digits; {', '.join(victims)} will be killed with SIGKILL. "
            f"A process does the imports of the groups once more, in a few seconds; then killed groups start from it."
        )
        log, view = StepLogReader(step_log, story), make_view(console)
        launcher = Launcher(programs, Restarts(max_restarts=kills + 3), audience, imports=job.imports)
        try:
            code = asyncio.run(_run(launcher, story, log, view, steps_file, seconds))
        finally:
            view.close(story)
            log.close()
        history = check_files([Path(folder)])
    summary = {
        **story.summary(),
        "history": {"records": history.records, "violations": dict(history.counts)},
        "seconds": round(time.monotonic() - started, 1),
    }
    summary_file.write_text(json.dumps(summary, indent=2) + "\n")
    console.print(final_table(summary))
    said = [f"history checked: {'; '.join(summary_lines(history))}: {verdict(history)}", *violation_lines(history)]
    console.print("\n".join(said), markup=False, highlight=False, soft_wrap=True)
    if code == 0 and story.succeeded() and history.fine:
        return 0
    console.print(f"the demo failed (exit code of the job: {code}). Last lines of output:", style="bold red")
    sys.stdout.write("\n".join(audience.lines) + "\n")
    return code if code > 128 else 1
