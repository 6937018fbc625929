"""``keepstep restart``: restart groups of a ``keepstep run`` on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import click

from keepstep_cli.asking.options import Named, job_option
from keepstep_cli.errors import Refused, Unreachable


@click.command(short_help="Restart groups of a `keepstep run` on this machine.")
@job_option
@click.option("--pid", type=int, help="Process of the `keepstep run`, if several runs have groups of these names.")
@click.argument("replicas", type=Named(), nargs=-1, required=True)
def restart(replicas: tuple[str, ...], *, job: str, pid: int | None) -> None:
    """Restart replica groups of a `keepstep run` on this machine, by the names in its output, such as r1.

    A group that trains finishes its step and leaves first. A group that is finished, given up, or waits for its
    restart starts at once.
    """
    from keepstep_cli.running.run_control import running_here

    runs = {run: _order(run, ())["groups"] for run in running_here(job, pid)}
    if not runs:
        other = "--job" if pid is None else "--pid"
        raise Unreachable(f"no `keepstep run` of job {job!r} by this user on this machine; give another {other}")
    for name in replicas:
        pids = [run.rpartition(" ")[2] for run, groups in runs.items() if name in groups]
        if len(pids) > 1:
            choice = " or ".join(pids)
            raise click.UsageError(f"{len(pids)} runs of job {job!r} have a group {name}; give --pid {choice}")
    restarted = {name for run in runs for name in _order(run, replicas)["restarted"]}
    for name in sorted(restarted):
        print(f"{name} restarts")
    if missing := [name for name in replicas if name not in restarted]:
        known = ", ".join(sorted({name for groups in runs.values() for name in groups}))
        raise Refused(f"no group {', '.join(missing)} here; groups of job {job!r}: {known}", HTTPStatus.NOT_FOUND)


def _order(run: str, replicas: Sequence[str]) -> dict[str, Any]:
    from keepstep_cli.running.run_control import order_restart

    try:
        return order_restart(run, replicas)
    except OSError as error:
        raise Unreachable(f"{run} does not answer: {error}") from error
