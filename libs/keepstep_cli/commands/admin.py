"""Commands that send requests and orders to a lighthouse."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import click
from click.core import ParameterSource

from keepstep_cli.asking.job_link import JobLink, show_json, with_lighthouse
from keepstep_cli.asking.known_names import job_names, refused_names, replica_names
from keepstep_cli.asking.options import Named, Seconds
from keepstep_cli.asking.policy_options import policy_change
from keepstep_cli.asking.rest import run
from keepstep_cli.asking.too_few import stop_of
from keepstep_cli.asking.units import EventNumber
from keepstep_cli.asking.watching import show, watch_option, wide_option
from keepstep_cli.errors import Refused

COMPARED = ("replicas_verified", "replicas_differ")
"""Kinds of events that report the result of a comparison."""


def _replica_argument(complete: Any = replica_names) -> Callable[[Any], Any]:
    return click.argument("replicas", type=Named(), nargs=-1, required=True, shell_complete=complete)


def _link_to(link: JobLink, name: str | None) -> JobLink:
    """Return the link to the job of the argument, or else of ``--job``."""
    if name and _is_flag("job") and name != link.job:
        raise click.UsageError(f"two jobs given: {name} and {link.job} (--job); give one")
    return replace(link, job=name or link.job)


def _is_flag(name: str) -> bool:
    """Whether an option was given on the command line, and not by a variable."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


@click.command()
@with_lighthouse
@watch_option
def status(link: JobLink, *, watch: bool) -> None:
    """Show the lighthouse and its jobs, or with --job one job."""
    from keepstep_cli.asking import tables

    def fetch() -> Callable[[], None]:
        cluster = run(link.service.get("cluster"))
        jobs = [link.get()] if _is_flag("job") else run(link.service.get("jobs"))["jobs"]
        if link.as_json:
            return lambda: show_json({**cluster, "jobs": jobs})
        return lambda: tables.show_status(cluster, jobs)

    show(fetch, watch=watch)


@click.command(short_help="Show all jobs and their states.")
@with_lighthouse
def jobs(link: JobLink) -> None:
    """Show all jobs with their states.

    States: running, standing or finishing (with the reason), closed, finished, failed, stopped, abandoned.
    """
    answer = run(link.service.get("jobs"))
    if link.as_json:
        show_json(answer)
        return
    from keepstep_cli.asking import tables

    tables.show_jobs(answer["jobs"], None)


@click.command(short_help="Show the replica groups of a job.")
@with_lighthouse
@watch_option
@wide_option
def replicas(link: JobLink, *, watch: bool, output: str | None) -> None:
    """Show the replica groups of a job. Lines below the table have errors and reasons."""
    from keepstep_cli.asking import tables

    def fetch() -> Callable[[], None]:
        answer = link.get("replicas")
        if link.as_json:
            return lambda: show_json(answer)
        return lambda: tables.show_replicas(answer["replicas"], wide=output == "wide")

    show(fetch, watch=watch)


@click.command(short_help="Show everything about replica groups.")
@with_lighthouse
@_replica_argument()
def inspect(link: JobLink, replicas: tuple[str, ...]) -> None:
    """Show everything about replica groups. REPLICAS are names or incarnations (name:uuid)."""
    answers = [link.get("replicas", replica) for replica in replicas]
    if link.as_json:
        show_json(answers if len(answers) > 1 else answers[0])
        return
    from keepstep_cli.asking import tables

    for answer in answers:
        tables.show_facts(answer)


@click.command()
@with_lighthouse
@click.option("--explain", is_flag=True, help="Show why the next quorum has not formed, or how the last one formed.")
def quorum(link: JobLink, *, explain: bool) -> None:
    """Show the members of the current quorum."""
    answer = link.get("quorum")
    if link.as_json:
        show_json(answer)
        return
    from keepstep_cli.asking import tables

    tables.show_quorum(answer, explain=explain)


@click.command(short_help="Show the stacks of the threads of a job.")
@with_lighthouse
@click.argument("group", required=False, default="")
def stacks(link: JobLink, *, group: str) -> None:
    """Show what each thread of each rank of a job does now; with GROUP, of one group.

    Ranks with equal stacks stand together. Only names and lines are shown, no values.
    """
    answer = link.get("stacks", group=group)
    if link.as_json:
        show_json(answer)
        return
    from keepstep_cli.asking import tables

    tables.show_stacks(answer)


@click.command(short_help="Show why groups ended.")
@with_lighthouse
@click.argument("number", required=False, type=EventNumber(), metavar="[INCIDENT]")
def incidents(link: JobLink, *, number: int | None) -> None:
    """Show why groups ended, and which machines fail repeatedly.

    With INCIDENT, such as 2.17, show one with the last lines of its log, and its stacks; it needs the admin token.
    Verdicts: script, machine, network, out of memory, preemption, unknown.
    """
    answer = link.get("incidents", *([] if number is None else [str(number)]))
    if link.as_json:
        show_json(answer)
        return
    from keepstep_cli.asking import tables

    if number is None:
        tables.show_incidents(answer)
    else:
        tables.show_incident(answer)


@click.command()
@with_lighthouse
@click.option("--follow", "-f", is_flag=True, help="Show new events as they happen.")
@click.option(
    "--after",
    type=EventNumber(),
    metavar="EVENT",
    help="Show the oldest events above this one, such as 2.17.  [default: newest]",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Maximum number of events; not with --follow.",
)
def events(link: JobLink, *, follow: bool, after: int | None, limit: int) -> None:
    """Show the event log of a job. With --json --follow, one line of JSON for each event.

    The number of an event, such as 2.17, is the epoch and a count. With --json it is the epoch times 4294967296, plus
    the count.
    """
    from keepstep_cli.asking import tables

    if not follow:
        after_which = {} if after is None else {"after": after}
        answer = link.get("events", limit=limit, **after_which)
        if link.as_json:
            show_json(answer)
        else:
            for event in answer["events"]:
                tables.show_event(event)
        return

    async def print_all() -> None:
        path = ("jobs", link.job, "events")
        async for event in link.service.follow(*path, after=after or 0, told=_to_stderr, follow=1):
            if link.as_json:
                print(json.dumps(event))
            else:
                tables.show_event(event)
            sys.stdout.flush()

    run(print_all())


def _to_stderr(sentence: str) -> None:
    print(f"keepstep: {sentence}", file=sys.stderr, flush=True)


@click.command(short_help="Show current heals and uploads.")
@with_lighthouse
@click.option("--follow", "-f", is_flag=True, help="Update every second, until Ctrl-C.")
def transfers(link: JobLink, *, follow: bool) -> None:
    """Show the current heals of a job, and its uploads to registered relays.

    With --json --follow, one line of JSON for each update.
    """
    from keepstep_cli.asking.transfers import follow_transfers, look, show_transfers

    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            run(follow_transfers(link.service, link.job, _to_stderr, as_json=link.as_json))
        return
    found = run(look(link.service, link.job))
    if link.as_json:
        show_json(found)
    else:
        show_transfers(found)


def _reason_option(verb: str) -> Callable[[Any], Any]:
    return click.option("--reason", default=f"`keepstep {verb}`", show_default=True, help="Reason for the event log.")


_yes_option = click.option(
    "--yes", is_flag=True, help="Do not ask if the job would stop, because fewer groups than min_replicas are left."
)


def _ask_first(link: JobLink, replicas: tuple[str, ...], *, yes: bool) -> None:
    """Ask on a terminal before an order after which the job stops. Raises Refused elsewhere."""
    if yes:
        return
    if stop := stop_of(link.get()["policy"], link.get("replicas")["replicas"], replicas):
        if not sys.stdin.isatty():
            raise Refused(f"{stop}; if that is meant, add --yes", HTTPStatus.CONFLICT)
        click.confirm(f"{stop[0].upper()}{stop[1:]}. Go on?", abort=True, err=True)


def _ordered(link: JobLink, answer: Any) -> None:
    if link.as_json:
        show_json(answer)
    else:
        _show_order(answer)


def _show_order(answer: Any) -> None:
    from keepstep_cli.asking import tables

    print(tables.short(answer["sentence"]))
    tables.show_event(answer)


def _order_each(link: JobLink, replicas: tuple[str, ...], order: str, **body: Any) -> None:
    """Give an order for each group. Raises the last refusal, after all orders were given."""
    answers, refusal = [], None
    for replica in dict.fromkeys(replicas):
        try:
            answer = link.post("replicas", replica, order, **body)
        except Refused as error:
            if refusal is not None:
                refusal.show()
            refusal = error
            continue
        answers.append(answer)
        if not link.as_json:
            _show_order(answer)
    if link.as_json and answers:
        show_json(answers if len(replicas) > 1 else answers[0])
    if refusal is not None:
        raise refusal


@click.command()
@with_lighthouse
@_replica_argument()
@_reason_option("evict")
@click.option(
    "--ban", type=Seconds(), default=0.0, metavar="TIME", help="Refuse its name for this time (10m, 2h).  [default: 0]"
)
@_yes_option
def evict(link: JobLink, replicas: tuple[str, ...], *, reason: str, ban: float, yes: bool) -> None:
    """End replica groups now. Their launcher may start them again, unless they are banned."""
    _ask_first(link, replicas, yes=yes)
    _order_each(link, replicas, "evict", reason=reason, ban_seconds=ban)


@click.command(short_help="Ask groups to finish their step, leave, and exit with 0.")
@with_lighthouse
@_replica_argument()
@_reason_option("drain")
@_yes_option
def drain(link: JobLink, replicas: tuple[str, ...], *, reason: str, yes: bool) -> None:
    """Ask replica groups to finish their step, leave, and exit with 0. No step is lost."""
    _ask_first(link, replicas, yes=yes)
    _order_each(link, replicas, "drain", reason=reason)


@click.command("replace", short_help="Let spares take the places of groups, which then leave.")
@with_lighthouse
@_replica_argument()
@_reason_option("replace")
def replace_groups(link: JobLink, replicas: tuple[str, ...], *, reason: str) -> None:
    """Let spares take the places of replica groups, which then finish their step, leave, and exit with 0.

    A group leaves when a spare has healed and committed a step. No step is lost.
    """
    _order_each(link, replicas, "replace", reason=reason)


@click.command()
@with_lighthouse
@_replica_argument(refused_names)
def readmit(link: JobLink, replicas: tuple[str, ...]) -> None:
    """Lift the ban or eviction of replica groups."""
    _order_each(link, replicas, "readmit")


@click.command("verify-replicas", short_help="Compare the weights of all replica groups.")
@with_lighthouse
@click.option(
    "--wait",
    type=Seconds(),
    default=60.0,
    show_default=True,
    metavar="TIME",
    help="Maximum wait for the step of the comparison.",
)
def verify_replicas(link: JobLink, *, wait: float) -> None:
    """Compare the weights of all replica groups, by root digests that they compute in their next step.

    Exit code: 0 the weights are equal, 1 they differ or were not compared in time.
    """
    order = link.post("verify")
    event = run(_comparison(link, order, wait))
    if link.as_json:
        show_json(event)
    else:
        from keepstep_cli.asking import tables

        tables.show_comparison(event["detail"])
    if event["kind"] != "replicas_verified":
        raise SystemExit(1)


async def _comparison(link: JobLink, order: Any, wait: float) -> Any:
    """Return the event that answers ``order``. Raises ClickException after ``wait`` seconds."""
    import asyncio

    follow = link.service.follow("jobs", link.job, "events", after=order["id"], told=_to_stderr, follow=1)
    try:
        async with asyncio.timeout(wait), contextlib.aclosing(follow) as events:
            async for event in events:
                if event["kind"] in COMPARED and event["detail"]["order"] >= order["detail"]["order"]:
                    return event
    except TimeoutError:
        pass
    raise click.ClickException(
        f"the groups of job {link.job!r} were not compared within {wait:g} s: it takes two that train at one step, "
        f"with a keepstep that can say its root digest. `keepstep quorum --explain` says what the next step waits for. "
        f"A change of leader forgets the order: give it again"
    )


@click.command()
@with_lighthouse
@click.argument("name", metavar="[JOB]", required=False, shell_complete=job_names)
@policy_change
def policy(link: JobLink, name: str | None, **limits: Any) -> None:
    """Show the policy of a job, or change the given limits. A change is stored, and holds at once."""
    link = _link_to(link, name)
    changes = {field: None if value == "none" else value for field, value in limits.items() if value is not None}
    answer = run(link.service.patch("jobs", link.job, **changes)) if changes else link.get()
    if link.as_json:
        show_json(answer if changes else answer["policy"])
        return
    from keepstep_cli.asking import tables

    tables.show_policy(answer["policy"])
    if not changes:
        return
    if answer["event"] is None:
        print("nothing to do: already done")
    else:
        tables.show_event(answer["event"])


@click.group()
def job() -> None:
    """Delete or reopen a job. `keepstep jobs` shows all jobs."""


@job.command(short_help="Delete a job that is no longer needed.")
@with_lighthouse
@click.argument("name", metavar="JOB", type=Named(), shell_complete=job_names)
@click.option("--force", is_flag=True, help="Evict connected replica groups first.")
def rm(link: JobLink, name: str, *, force: bool) -> None:
    """Delete a job from the lighthouse: its quorum, policy, bans, and event list. Checkpoints stay.

    The next group that names the job creates it again, so stop the launchers first. Needs the admin token.
    """
    query = {"force": "true"} if force else {}
    _ordered(link, run(link.service.delete("jobs", _link_to(link, name).job, **query)))


@job.command(short_help="Let a closed job train on.")
@with_lighthouse
@click.argument("name", metavar="JOB", type=Named(), shell_complete=job_names)
def reopen(link: JobLink, name: str) -> None:
    """Let the groups of a job train on, after all of them have finished (Manager.finish).

    They need a checkpoint of the final step, or a later one. Needs the admin token.
    """
    _ordered(link, run(link.service.post("jobs", _link_to(link, name).job, "reopen")))


COMMANDS = (
    status,
    jobs,
    replicas,
    inspect,
    quorum,
    events,
    stacks,
    incidents,
    transfers,
    policy,
    verify_replicas,
    evict,
    drain,
    replace_groups,
    readmit,
    job,
)
