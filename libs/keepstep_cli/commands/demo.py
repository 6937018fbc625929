"""``keepstep demo``: the command. ``demo_run`` runs it, ``demo_story`` decides, ``demo_view`` shows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import click

from keepstep_cli.asking.options import Seconds
from keepstep_cli.errors import Missing

NEEDED = ("torch", "numpy", "xxhash", "sklearn")
SHORT_GROUPS, SHORT_KILLS = 2, 2
ONE_COPY_KILLS, SHORT_ONE_COPY_KILLS = 3, 1
SECONDS, ONE_COPY_SECONDS = 180.0, 600.0


@click.command(short_help="Watch a training job survive kill -9, again and again.")
@click.option("--replicas", type=click.IntRange(2), default=3, show_default=True, help="Replica groups.")
@click.option(
    "--seconds",
    type=Seconds(),
    help=f"Give up after this time.  [default: {SECONDS:.0f}; with --one-copy {ONE_COPY_SECONDS:.0f}]",
)
@click.option(
    "--short",
    is_flag=True,
    help="Two groups, one of them and the lighthouse killed, for CI; with --one-copy, one kill.",
)
@click.option("--resume", is_flag=True, help="Kill all groups, the lighthouse and the relay at once, and resume.")
@click.option("--one-copy", is_flag=True, help="Shard one model over four ranks, and kill them one after another.")
@click.option(
    "--summary",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("demo-summary.json"),
    show_default=True,
    help="File for the table as JSON.",
)
def demo(*, replicas: int, seconds: float | None, short: bool, resume: bool, one_copy: bool, summary: Path) -> None:
    """Watch a training job survive: each group and the lighthouse are killed, one after another.

    Trains a small network on scikit-learn's handwritten digits over three replica groups, in less than a minute.

    With --resume, two groups train the same steps twice: once undisturbed, and once with all groups and services
    killed at once and started again. The losses of both must be equal in every bit.

    With --one-copy, four ranks train one model that is sharded over them (FSDP2), twice: once with a rank killed every
    few seconds, and once undisturbed. A spare takes each place, and no step is lost: the final weights of both must be
    equal in every bit.

    Exit code: 0 if the job survived every kill, all groups ended with bit-identical weights, and the logs show no
    violation; else 1.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Missing(f"the demo trains a network and needs {', '.join(missing)}: pip install 'keepstep[demo]'")
    if not summary.absolute().parent.is_dir():
        raise click.UsageError(f"--summary {summary}: folder {summary.parent} not found")
    seconds = seconds or (ONE_COPY_SECONDS if one_copy else SECONDS)
    if resume:
        from keepstep_cli.demo.resume_run import run_resume_demo

        sys.exit(run_resume_demo(SHORT_GROUPS, seconds, summary))
    if one_copy:
        from keepstep_cli.demo.one_copy_run import run_one_copy_demo

        sys.exit(run_one_copy_demo(SHORT_ONE_COPY_KILLS if short else ONE_COPY_KILLS, seconds, summary))
    from keepstep_cli.demo.demo_run import run_demo

    replicas, kills = (SHORT_GROUPS, SHORT_KILLS) if short else (replicas, replicas + 1)  # the lighthouse is killed too
    sys.exit(run_demo(replicas, kills, seconds, summary))
