"""``keepstep run``: replica groups of a script on this machine, restarted when they die."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keepstep_cli.asking import options
from keepstep_cli.running.supervisor import MAX_RESTARTS, Restarts

if TYPE_CHECKING:
    from keepstep_cli.asking.rest import Lighthouse
    from keepstep_mesh.security.tls import TlsFiles

ASK_FIRST_SECONDS = 5.0


class ConsoleAudience:
    """Prints what ranks print where they meant it to go, and what the supervisor says to standard error.

    Raises BrokenPipeError when nobody reads any more. What a full disk does not take is lost, and the job goes on.
    """

    def __init__(self) -> None:
        from keepstep_cli.running.output import PrefixedOutput

        self._out = PrefixedOutput(sys.stdout)
        self._err = PrefixedOutput(sys.stderr)
        self._out_fails = False

    def line(self, group: str, rank: int, text: str, *, error: bool) -> None:
        if error:
            self._write_error(group, rank, text)
            return
        try:
            self._out.write(group, rank, text)
            self._out_fails = False
        except BrokenPipeError:
            raise
        except OSError as reason:
            if not self._out_fails:
                self._out_fails = True
                self.note("run", f"standard output takes nothing ({reason.strerror}): what ranks print is lost")

    def note(self, group: str, sentence: str) -> None:
        self._write_error(group, None, sentence)

    def _write_error(self, group: str, rank: int | None, text: str) -> None:
        """There is nowhere left to say that this cannot be written."""
        try:
            self._err.write(group, rank, text)
        except BrokenPipeError:
            raise
        except OSError:
            pass


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--replicas", type=click.IntRange(1), required=True, help="Replica groups to run here.")
@click.option("--nproc-per-replica", type=click.IntRange(1), default=1, show_default=True, help="Ranks of each group.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=MAX_RESTARTS,
    show_default=True,
    help="Restarts of one group after which it is given up; the others go on.",
)
@click.option(
    "--grace", type=options.Seconds(), default=10.0, show_default=True, help="Seconds from SIGTERM to SIGKILL."
)
@options.lighthouse_option
@options.job_option
@options.token_option
@options.tls_options
@click.option(
    "--min-replicas",
    type=click.IntRange(1),
    help="Of the lighthouse started here: groups that a step needs.  [default: 1]",
)
@click.option(
    "--join-timeout",
    type=options.Seconds(),
    help="Of the lighthouse started here: wait so long for groups that have not asked.  [default: 60]",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Of the lighthouse started here: where it keeps its state and events.jsonl.  [default: forgotten at the end]",
)
@click.option(
    "--first-replica",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number of the first group here, when one job runs on several machines.",
)
@click.option(
    "--replicas-in-job", type=click.IntRange(1), help="Groups on all machines together.  [default: those here]"
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    program: str,
    arguments: tuple[str, ...],
    *,
    replicas: int,
    nproc_per_replica: int,
    max_restarts: int,
    grace: float,
    addresses: str | None,
    job: str,
    token_file: Path | None,
    tls: TlsFiles,
    min_replicas: int | None,
    join_timeout: float | None,
    state_dir: Path | None,
    first_replica: int,
    replicas_in_job: int | None,
) -> None:
    """Run replica groups of a script and restart those that die.

    keepstep run --replicas 3 -- train.py --epochs 10

    Each rank gets torchrun's environment, and its output is printed as "[r0/1] line": group, rank. A rank that dies
    ends its group, which is started again after a short wait, one that was evicted when it is not banned any more; a
    group whose ranks all exit with 0 is finished. Ctrl-C ends all groups cleanly, a second one at once. Without
    --lighthouse one is started for the job.

    Exit code: 0 all groups finished, 1 a group was given up, 128 + n ended by signal n.
    """
    import asyncio
    import os
    import tempfile
    from functools import partial

    from keepstep_cli.asking.rest import Lighthouse, read_token
    from keepstep_cli.running import embedded
    from keepstep_cli.running.bans import ask_ban
    from keepstep_cli.running.launcher import Launcher, Program, replica_programs, stop_on_signals
    from keepstep_cli.running.ranks import JobSpec, command_line, program_problem
    from keepstep_mesh.protocol import names
    from keepstep_mesh.security.tls import TlsError

    if (problem := program_problem(program)) is not None:
        raise click.UsageError(problem)
    if (problem := names.problem(job, "job")) is not None:
        raise click.UsageError(f"--job: {problem}")
    if addresses and (min_replicas or join_timeout is not None):
        raise click.UsageError(
            f"--min-replicas and --join-timeout are for the lighthouse that is started here, but {addresses} is used: "
            f"give them to that one, or unset KEEPSTEP_LIGHTHOUSE"
        )
    _check_numbers(replicas, first_replica, replicas_in_job, min_replicas)
    token = read_token(token_file)
    try:
        tls.client_context()
    except TlsError as error:
        raise click.UsageError(str(error)) from error
    audience = ConsoleAudience()
    if addresses:
        _ask_first(Lighthouse(addresses, token, tls, timeout=ASK_FIRST_SECONDS), audience)
    programs: list[Program] = []
    with tempfile.TemporaryDirectory(prefix="keepstep-") as forgotten:
        if not addresses:
            port, other = embedded.place()
            if other is not None:
                audience.note("run", f"a lighthouse is at {other} and is not used; --lighthouse {other} uses it")
            addresses = f"http://127.0.0.1:{port}"
            flags = ["--initial-replicas", str(replicas_in_job or replicas)]
            flags += [] if min_replicas is None else ["--min-replicas", str(min_replicas)]
            flags += [] if join_timeout is None else ["--join-timeout", str(join_timeout)]
            folder = options.make_folder(state_dir or Path(forgotten))
            programs.append(embedded.lighthouse_program(port, folder, os.environ, tuple(flags)))
            audience.note(embedded.NAME, f"{addresses}; ask it with `keepstep status --lighthouse {addresses}`")
        told = Path(forgotten) / "names"
        told.mkdir()
        spec = JobSpec(
            command=command_line(program, arguments),
            replicas=replicas,
            nproc_per_replica=nproc_per_replica,
            lighthouse=addresses,
            job=job,
            run_id=f"{job}-{os.getpid()}",
            max_restarts=max_restarts,
            token_file=token_file,
            tls=tls,
            first_group=first_replica,
            replicas_in_job=replicas_in_job,
            names=told,
        )
        programs += replica_programs(spec, os.environ)
        bans = partial(ask_ban, Lighthouse(addresses, token, tls), job, told)

        async def launch() -> int:
            launcher = Launcher(programs, Restarts(max_restarts=max_restarts, grace=grace), audience, bans)
            with stop_on_signals(launcher):
                return await launcher.run()

        sys.exit(asyncio.run(launch()))


def _check_numbers(replicas: int, first: int, in_job: int | None, min_replicas: int | None) -> None:
    """Raises ``click.UsageError`` for numbers that do not fit each other."""
    groups = in_job or first + replicas
    if first + replicas > groups:
        raise click.UsageError(
            f"--first-replica {first} and --replicas {replicas} make groups up to r{first + replicas - 1}, but "
            f"--replicas-in-job {groups} has none beyond r{groups - 1}"
        )
    if min_replicas is not None and min_replicas > groups:
        raise click.UsageError(
            f"--min-replicas {min_replicas}: no step could ever be made, the job has {groups} groups"
        )


def _ask_first(lighthouse: Lighthouse, audience: ConsoleAudience) -> None:
    """Raises what a lighthouse says that does not take us. One that is not there yet is no error: trainers wait."""
    import asyncio

    from keepstep_cli.errors import Refused, Unreachable

    try:
        asyncio.run(lighthouse.get("jobs"))
    except (Refused, Unreachable) as error:
        if not error.may_pass:
            raise
        for line in error.message.splitlines():
            audience.note("run", line)
        audience.note("run", "the groups are started all the same, and wait for it (connect_timeout)")
