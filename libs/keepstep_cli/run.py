"""``keepstep run``: replica groups of a script on this machine, restarted when they die."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keepstep_cli import options
from keepstep_cli.supervisor import MAX_RESTARTS, Restarts

if TYPE_CHECKING:
    from keepstep_mesh.tls import TlsFiles


class ConsoleAudience:
    """Prints what ranks print where they meant it to go, and what the supervisor says to standard error."""

    def __init__(self) -> None:
        from keepstep_cli.output import PrefixedOutput

        self._out = PrefixedOutput(sys.stdout)
        self._err = PrefixedOutput(sys.stderr)

    def line(self, group: str, rank: int, text: str, *, error: bool) -> None:
        (self._err if error else self._out).write(group, rank, text)

    def note(self, group: str, sentence: str) -> None:
        self._err.write(group, None, sentence)


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
    "--grace", type=click.FloatRange(0), default=10.0, show_default=True, help="Seconds from SIGTERM to SIGKILL."
)
@options.lighthouse_option
@options.job_option
@options.token_option
@options.tls_options
@click.option(
    "--min-replicas", type=click.IntRange(1), help="Of the lighthouse started here: groups that a step needs."
)
@click.option(
    "--join-timeout",
    type=options.Seconds(),
    help="Of the lighthouse started here: wait so long for groups that have not asked.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Of the lighthouse started here: where it keeps its state.  [default: forgotten at the end]",
)
@click.option(
    "--first-replica", type=click.IntRange(0), default=0, show_default=True, help="Number of the first group here."
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

    from keepstep_cli import embedded
    from keepstep_cli.bans import ban_left
    from keepstep_cli.launcher import Launcher, Program, replica_programs, stop_on_signals
    from keepstep_cli.ranks import JobSpec, command_line
    from keepstep_cli.rest import Lighthouse, read_token
    from keepstep_mesh.tls import TlsError

    if program.endswith(".py") and not Path(program).is_file():
        raise click.UsageError(f"there is no file {program}; the current folder is {Path.cwd()}")
    if addresses and (min_replicas or join_timeout):
        raise click.UsageError(
            f"--min-replicas and --join-timeout are for the lighthouse that is started here, but {addresses} is used: "
            f"give them to that one, or unset KEEPSTEP_LIGHTHOUSE"
        )
    token = read_token(token_file)
    try:
        tls.client_context()
    except TlsError as error:
        raise click.UsageError(str(error)) from error
    audience = ConsoleAudience()
    programs: list[Program] = []
    with tempfile.TemporaryDirectory(prefix="keepstep-") as forgotten:
        if not addresses:
            port = embedded.usual_port()
            addresses = f"http://127.0.0.1:{port}"
            flags = [] if min_replicas is None else ["--min-replicas", str(min_replicas)]
            flags += [] if join_timeout is None else ["--join-timeout", str(join_timeout)]
            folder = options.make_folder(state_dir or Path(forgotten))
            programs.append(embedded.lighthouse_program(port, folder, os.environ, tuple(flags)))
            audience.note(embedded.NAME, f"{addresses}; ask it with `keepstep status --lighthouse {addresses}`")
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
        )
        programs += replica_programs(spec, os.environ)
        asked = partial(ban_left, Lighthouse(addresses, token, tls), job)

        async def launch() -> int:
            launcher = Launcher(programs, Restarts(max_restarts=max_restarts, grace=grace), audience, asked)
            with stop_on_signals(launcher):
                return await launcher.run()

        sys.exit(asyncio.run(launch()))
