"""``keepstep chaos``: inject faults at random into a running job, and report what they cost."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from keepstep_chaos.vocabulary import KINDS
from keepstep_cli.asking.job_link import JobLink, with_lighthouse
from keepstep_cli.asking.options import Seconds

PREVIEWED = 20


@click.command("chaos", short_help="Inject faults into a running job.")
@with_lighthouse
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the faults.")
@click.option("--seconds", type=Seconds(), default=60.0, show_default=True, help="Duration; 0: until --faults.")
@click.option("--faults", type=click.IntRange(0), default=0, help="Number of faults.  [default: no limit]")
@click.option("--only", multiple=True, type=click.Choice(list(KINDS)), help="Kind of fault; may be repeated.")
@click.option("--target", "chosen", multiple=True, metavar="NAME", help="Target to hit, such as r1 or relay.")
@click.option(
    "--at-most", type=click.IntRange(1), default=2, show_default=True, help="Targets that are down at the same time."
)
@click.option(
    "--mean-seconds-between",
    type=Seconds(),
    default=10.0,
    show_default=True,
    help="Mean pause, unless the job recovers earlier.",
)
@click.option("--mtbf", type=Seconds(), help="Mean time between failures: a pause that no recovery ends earlier.")
@click.option("--longest", type=Seconds(), default=8.0, show_default=True, help="Longest duration of a fault.")
@click.option("--beyond-limits", is_flag=True, help="Also leave too few groups for a quorum, or no lighthouse.")
@click.option("--etcd", multiple=True, metavar="URL", help="Address of an etcd node to hit, such as http://e1:2379.")
@click.option(
    "--exec",
    "templates",
    multiple=True,
    metavar="TEMPLATE",
    help="Command that reaches a target elsewhere, such as 'kubectl exec {name} -- {command}'; may be repeated.",
)
@click.option("--restart-services", is_flag=True, help="Also kill services; this command starts them again.")
@click.option("--fill-shared-disks", is_flag=True, help="Fill filesystems that others may use.")
@click.option("--logs", multiple=True, type=click.Path(exists=True, path_type=Path), help="Log, or folder with logs.")
@click.option("--digests", type=click.Path(exists=True, path_type=Path), help="Folder with *.digests of the trainers.")
@click.option(
    "--samples-per-step", type=click.IntRange(1), help="Samples that a group takes in a step, to report lost samples."
)
@click.option("--wedge", type=Seconds(), default=60.0, show_default=True, help="Time without a commit that is a wedge.")
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("chaos-results"),
    show_default=True,
    help="Folder for results.json, results.md, and the state of a wedged job.",
)
@click.option("--dry-run", is_flag=True, help="Print targets and faults, and hit nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before the first fault.")
def chaos(
    link: JobLink,
    *,
    seed: int,
    seconds: float,
    faults: int,
    only: tuple[str, ...],
    chosen: tuple[str, ...],
    at_most: int,
    mean_seconds_between: float,
    mtbf: float | None,
    longest: float,
    beyond_limits: bool,
    etcd: tuple[str, ...],
    templates: tuple[str, ...],
    restart_services: bool,
    fill_shared_disks: bool,
    logs: tuple[Path, ...],
    digests: Path | None,
    samples_per_step: int | None,
    wedge: float,
    results: Path,
    dry_run: bool,
    yes: bool,
) -> None:
    """Inject faults at random into a job of `keepstep run` on this machine, and report what each of them cost.

    With --exec the job may run anywhere: in containers, in pods, on other machines. The command lists its targets and
    asks before it hits them. The faults follow from --seed.

    Exit code: 0 no promise was broken, 1 one was (a violation in the history, different weights, a target that did not
    recover), 7 the job is wedged.
    """
    from keepstep_chaos.chaos_run import Request, prepare, run_chaos, show_plan
    from keepstep_chaos.engine import Duration
    from keepstep_chaos.injecting.elsewhere import parse
    from keepstep_chaos.injecting.injection import Permissions
    from keepstep_chaos.schedule import Limits
    from keepstep_cli.errors import Wedged

    if not seconds and not faults:
        raise click.UsageError("--seconds 0 needs --faults: otherwise the run has no end")
    pause = mean_seconds_between if mtbf is None else mtbf
    if pause <= 0 or longest <= 0 or wedge <= 0:
        raise click.UsageError("--mean-seconds-between, --mtbf, --longest, and --wedge must be above 0")
    try:
        known = parse(templates) if templates else None
    except ValueError as error:
        raise click.UsageError(f"--exec: {error}") from error
    request = Request(
        seed=seed,
        duration=Duration(seconds, faults, wedge),
        limits=Limits(at_most, 1, beyond_limits, pause, longest, mtbf is not None),
        permissions=Permissions(restart_services, fill_shared_disks),
        only=only,
        targets=chosen,
        etcd=etcd,
        templates=known,
        logs=logs,
        digests=digests,
        samples_per_step=samples_per_step,
        results=results,
    )
    plan = prepare(link.service, link.job, request)
    if not link.as_json or dry_run:
        show_plan(plan, PREVIEWED if dry_run else 0)
    if dry_run:
        return
    if not yes:
        click.confirm("Inject faults into these targets?", abort=True, err=True)
    outcome = run_chaos(link.service, plan, as_json=link.as_json)
    if outcome.wedged:
        raise Wedged(f"job {link.job!r} is wedged; {results} has its quorum, its groups, and its processes")
    sys.exit(1 if outcome.broken() else 0)
