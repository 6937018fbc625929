"""``keepstep restart``: restart groups of a ``keepstep run`` on this machine."""

from __future__ import annotations

from http import HTTPStatus

import click

from keepstep_cli.asking.options import Named, job_option
from keepstep_cli.errors import Refused, Unreachable


@click.command(short_help="Restart groups of a `keepstep run` on this machine.")
@job_option
@click.argument("replicas", type=Named(), nargs=-1, required=True)
def restart(replicas: tuple[str, ...], *, job: str) -> None:
    """Restart replica groups of a `keepstep run` on this machine, by the names in its output, such as r1.

    A group that trains finishes its step and leaves first. A group that is finished, given up, or waits for its
    restart starts at once.
    """
    from keepstep_cli.running.run_control import order_restart, running_here

    runs = running_here(job)
    if not runs:
        raise Unreachable(f"no `keepstep run` of job {job!r} by this user on this machine; give another --job")
    restarted: set[str] = set()
    known: list[str] = []
    for run in runs:
        try:
            answer = order_restart(run, replicas)
        except OSError as error:
            raise Unreachable(f"{run} does not answer: {error}") from error
        restarted |= set(answer["restarted"])
        known += answer["groups"]
    for name in sorted(restarted):
        print(f"{name} restarts")
    if missing := [name for name in replicas if name not in restarted]:
        raise Refused(
            f"no group {', '.join(missing)} here; groups of job {job!r}: {', '.join(known)}", HTTPStatus.NOT_FOUND
        )
