"""Prepare and run ``keepstep chaos``: find targets, show them, run the engine, check, and write the report."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from keepstep_chaos.engine import Duration, Engine
from keepstep_chaos.injecting.elsewhere import Templates, command, reaches
from keepstep_chaos.injecting.injection import Permissions, available, unavailable
from keepstep_chaos.injecting.interruption import cancel_at_signals
from keepstep_chaos.observing import observation
from keepstep_chaos.observing.targets import Places, find, find_elsewhere
from keepstep_chaos.recovery import Recovery
from keepstep_chaos.schedule import Limits, Schedule, choices
from keepstep_chaos.verdict import COLUMNS, GROWTH_COLUMNS, Outcome, fault_rows, growth_rows, markdown, summary
from keepstep_chaos.vocabulary import KINDS, Role, Target
from keepstep_cli.asking import tables
from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.asking.rest import run as run_async

LIST_SECONDS = 10.0
UNDONE = "every fault was undone"
UNDONE_ELSEWHERE = (
    "the commands of faults got SIGINT; where it does not reach `keepstep inject`, a fault ends in its time"
)


@dataclass(frozen=True, slots=True)
class Request:
    """Flags of the command."""

    seed: int
    duration: Duration
    limits: Limits
    permissions: Permissions
    only: tuple[str, ...] = ()
    """Kinds of faults; empty: all that are available."""
    targets: tuple[str, ...] = ()
    """Names or roles; empty: all targets."""
    etcd: tuple[str, ...] = ()
    logs: tuple[Path, ...] = ()
    """Logs and folders; empty: those that the processes tell."""
    templates: Templates | None = None
    """Of commands for targets elsewhere; None: the targets are processes of this machine."""
    digests: Path | None = None
    samples_per_step: int | None = None
    """That each group takes in a step; None: not known."""
    results: Path = Path("chaos-results")


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, with all that was found for it."""

    request: Request
    places: Places
    kinds: dict[Target, list[str]]
    """Kinds that can hit each target."""
    left_out: dict[str, str]
    """Kinds that can hit no target, with the reason."""
    schedule: Schedule
    logs: list[Path]


def prepare(lighthouse: Lighthouse, job: str, request: Request) -> Plan:
    """Find the targets and draw the first faults.

    Raises:
        click.UsageError: a kind or target of the request is not available.
        ClickException: the job or its lighthouse cannot be found.
    """

    async def ask() -> tuple[Places, int, int | None]:
        search = find if request.templates is None else find_elsewhere
        found = await search(lighthouse, job, request.etcd)
        least = (await lighthouse.get("jobs", job))["policy"]["min_replicas"]
        groups = (await lighthouse.get("jobs", job, "replicas"))["replicas"]
        return found, least, min((len(one["shards"]["keepers"]) for one in groups if one.get("shards")), default=None)

    places, least, copies = run_async(ask())
    request = replace(request, limits=replace(request.limits, min_groups=max(1, least), groups_down=copies))
    hit = [one for one in places.targets if _chosen(one, request.targets)]
    if not hit:
        known = ", ".join(map(str, places.targets))
        raise click.UsageError(f"--target {', '.join(request.targets)} not found; known targets: {known}")
    kinds = {target: _kinds(places, target, request) if target in hit else [] for target in places.targets}
    bearable = choices(places.targets, kinds, request.limits)
    kinds = {one: [fault.kind.name for fault in bearable if fault.target == one] for one in places.targets}
    possible = {fault.kind.name for fault in bearable}
    left_out = {name: _reason(places, hit, name, request) for name in request.only or KINDS if name not in possible}
    if request.only and left_out:
        raise click.UsageError("; ".join(f"--only {name}: {why}" for name, why in left_out.items()))
    try:
        schedule = Schedule(request.seed, places.targets, kinds, request.limits)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    logs = list(request.logs) or observation.logs_of(places)
    return Plan(request, places, kinds, left_out, schedule, logs)


def _chosen(target: Target, names: tuple[str, ...]) -> bool:
    return not names or bool({target.name, str(target), str(target.role)} & {*names})


def _kinds(places: Places, target: Target, request: Request) -> list[str]:
    found = available(places.by_target[target], request.permissions)
    if request.templates is not None:
        found = [
            name
            for name, kind in KINDS.items()
            if target.role in kind.roles and reaches(request.templates, target, name)
        ]
    if request.limits.groups_down is not None:
        found = [name for name in found if name != "verify"]
    return [name for name in found if name in request.only or not (request.only or KINDS[name].asked_for)]


def _reason(places: Places, targets: list[Target], kind: str, request: Request) -> str:
    for target in targets if request.templates is None else ():
        if why := unavailable(places.by_target[target], request.permissions).get(kind):
            return f"{target}: {why}"
    if KINDS[kind].asked_for and not request.only:
        return f"it may spoil the weights of all groups; ask for it with --only {kind}"
    if kind == "verify" and request.limits.groups_down is not None:
        return "the model exists once: each group holds other shards, so none compare"
    able = [target for target in targets if target.role in KINDS[kind].roles]
    if able and request.templates is not None and not any(reaches(request.templates, one, kind) for one in able):
        return f"no template reaches it; pass --exec '{kind}=COMMAND'"
    if able:
        return "it would leave too few groups or no lighthouse; pass --beyond-limits"
    return "no target of the right kind"


def show_plan(plan: Plan, previewed: int) -> None:
    """Print the targets, the kinds that are left out, and the first faults."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("target", "where" if plan.request.templates else "processes", "faults"):
        table.add_column(column)
    for target, place in sorted(plan.places.by_target.items()):
        if kinds := plan.kinds[target]:
            where = place.url if place.elsewhere else " ".join(map(str, place.pids))
            table.add_row(str(target), where, ", ".join(kinds))
    tables.console().print(table)
    for name, why in plan.left_out.items():
        print(f"left out: {name}: {why}")
    print(f"logs: {', '.join(map(str, plan.logs)) or 'none; pass --logs'}")
    for fault in plan.schedule.preview(previewed):
        print(f"{fault.number:5} {fault}")
        templates = plan.request.templates
        if templates is not None and (words := templates.of(fault.target, fault.kind.name)) is not None:
            address = plan.places.by_target[fault.target].url
            print(f"      {shlex.join(command(words, fault, plan.places.job, address))}")


def run_chaos(
    lighthouse: Lighthouse, plan: Plan, *, as_json: bool, say: Callable[[str], None] | None = None
) -> Outcome:
    """Run the faults; write ``results.json`` and ``results.md``, and the state of a wedged job. Print the report.

    ``say`` receives a line for each fault; default: standard error.
    """
    request = plan.request
    request.results.mkdir(parents=True, exist_ok=True)
    began = time.time()
    recovery = Recovery(plan.places.targets, request.limits.min_groups, began)
    engine = Engine(
        plan.places,
        plan.schedule,
        recovery,
        lighthouse,
        plan.logs,
        request.results,
        say or _to_standard_error,
        request.templates,
    )

    async def play() -> None:
        running = asyncio.current_task()
        assert running is not None
        cancel_at_signals(running)
        await engine.run(request.duration)
        if engine.wedged:
            await _save_wedge(lighthouse, plan.places.job, request.results)

    try:
        asyncio.run(play())
    except asyncio.CancelledError:
        _to_standard_error("keepstep: interrupted; " + (UNDONE if request.templates is None else UNDONE_ELSEWHERE))
    outcome = _outcome(plan, engine, recovery, time.time() - began)
    (request.results / "results.json").write_text(json.dumps(outcome.json(), indent=1) + "\n", encoding="utf-8")
    (request.results / "results.md").write_text(markdown(outcome, plan.places.job), encoding="utf-8")
    if as_json:
        print(json.dumps(outcome.json(), indent=2))
    else:
        show_outcome(outcome)
    return outcome


def _to_standard_error(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _outcome(plan: Plan, engine: Engine, recovery: Recovery, seconds: float) -> Outcome:
    from keepstep_chaos.histories.reading import NoLogsError, check_files

    outcome = Outcome(plan.request.seed, seconds, recovery.costs, recovery.commits, engine.resources.growth())
    outcome.wedged, outcome.unrecovered = engine.wedged, sorted(recovery.down)
    outcome.unseen = sorted(recovery.unseen & {cost.fault.target for cost in outcome.injected})
    outcome.comparisons, outcome.differences = engine.observer.comparisons, engine.observer.differences
    outcome.left_out, outcome.samples_per_step = plan.left_out, plan.request.samples_per_step
    limits = plan.request.limits
    outcome.keeps_steps = limits.groups_down is not None and not limits.beyond_limits
    outcome.groups = sum(target.role == Role.GROUP for target in plan.places.targets)
    if engine.observer.steps_seen:
        outcome.step_seconds = recovery.pace.step_seconds
        outcome.goodput = recovery.pace.goodput(outcome.groups, seconds)
    if plan.logs:
        try:
            report = check_files(plan.logs)
        except (OSError, NoLogsError) as error:
            outcome.violations = [str(error)]
        else:
            outcome.violations = [f"{one.rule}: {one.what}" for one in report.violations]
            outcome.checked_steps = sum(job.steps for job in report.jobs.values())
    if plan.request.digests is not None:
        outcome.compared_weights, outcome.different_weights = observation.differing_weights(plan.request.digests)
    return outcome


def show_outcome(outcome: Outcome) -> None:
    """Print the tables and the verdict."""
    for columns, rows in ((COLUMNS, fault_rows(outcome.injected)), (GROWTH_COLUMNS, growth_rows(outcome.growth))):
        table = Table(box=SIMPLE_HEAD)
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right")
        for row in rows:
            table.add_row(*row)
        if rows:
            tables.console().print(table)
    print(*summary(outcome), sep="\n")


async def _save_wedge(lighthouse: Lighthouse, job: str, folder: Path) -> None:
    """Write what explains a wedged job: its quorum, its groups, and the processes of this machine."""
    for path in ("quorum", "replicas"):
        try:
            found = json.dumps(await lighthouse.get("jobs", job, path), indent=1)
        except click.ClickException as error:
            found = error.message
        (folder / f"wedge-{path}.json").write_text(found + "\n", encoding="utf-8")
    listed = subprocess.run(  # noqa: ASYNC221 - a fixed command, at the end
        ["ps", "-eo", "pid,ppid,stat,etime,rss,args"],  # noqa: S607
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIST_SECONDS,
    )  # fmt: skip
    (folder / "wedge-processes.txt").write_text(listed.stdout, encoding="utf-8")
