"""``keepstep run``: run replica groups of a script on this machine, and restart those that die."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep_cli.asking import options
from keepstep_cli.asking.sections import SectionedCommand
from keepstep_cli.running.supervisor_events import MAX_RESTARTS, REFUSED_PAUSE, RESTART_BACKOFF, Restarts

if TYPE_CHECKING:
    from keepstep_cli.asking.rest import Lighthouse
    from keepstep_cli.running.console.console_audience import ConsoleAudience
    from keepstep_mesh.security.tls import TlsFiles

START_SECONDS = 30.0
"""Time for which a group that failed waits for an answer of the lighthouse that this command starts."""


SECTIONS = {
    "Groups": ("--replicas", "--nproc-per-replica", "--gpus-per-replica", "--spares"),
    "Restarts and the end": (
        "--max-restarts",
        "--hang-after",
        "--max-restart-pause",
        "--grace",
        "--notice",
        "--final-code",
    ),
    "Checks before a group joins": ("--check", "--check-with", "--check-pause"),
    "Warm starts": ("--cold", "--preload"),
    "Output": ("--log-dir", "--timestamps"),
    "A lighthouse that runs": ("--lighthouse", "--job", "--token-file", "--tls-ca", "--tls-cert", "--tls-key"),
    "The lighthouse started here": ("--min-replicas", "--join-timeout", "--refuse-going-back", "--state-dir"),
    "Several machines": ("--first-replica", "--replicas-in-job", "--spares-in-job"),
    "Groups of several machines": ("--nnodes", "--node-rank", "--master-addr", "--master-port"),
}


@click.command(
    cls=SectionedCommand,
    sections=SECTIONS,
    short_help="Run replica groups of a script; restart dead ones.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--replicas", type=click.IntRange(1), required=True, help="Replica groups to run on this machine.")
@click.option("--nproc-per-replica", type=click.IntRange(1), default=1, show_default=True, help="Ranks of each group.")
@click.option(
    "--gpus-per-replica",
    type=click.IntRange(1),
    help="GPUs of each group: sets its CUDA_VISIBLE_DEVICES.  [default: all groups see all GPUs]",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=MAX_RESTARTS,
    show_default=True,
    help="Give up a group after this many restarts; the others go on.",
)
@click.option(
    "--max-restart-pause",
    type=options.Seconds(),
    default=RESTART_BACKOFF.most,
    show_default=True,
    help="Longest pause before a restart. It grows with each life in a row that is shorter than 10 s.",
)
@click.option(
    "--hang-after",
    type=options.Seconds(),
    help="Limit for a rank whose interpreter is locked, and of the lighthouse started here for groups that hang; 0: "
    "none.  [default: 60, and learned]",
)
@click.option(
    "--final-code",
    type=click.IntRange(0, 255),
    help="Exit code if a new start would end the same.  [default: that of the group: 65, 76, 78 to 83]",
)
@click.option(
    "--grace", type=options.Seconds(), default=10.0, show_default=True, help="Seconds from SIGTERM to SIGKILL."
)
@click.option(
    "--spares",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="More groups to run, which stand by until a group is missing.",
)
@click.option(
    "--notice",
    type=options.Seconds(),
    default=0.0,
    show_default=True,
    help="Seconds from SIGTERM in which spares may take the places of the groups; --grace follows.",
)
@click.option("--check", is_flag=True, help="Check the machine before a group joins.")
@click.option(
    "--check-with",
    "checks",
    multiple=True,
    metavar="CHECK",
    help="As --check, and with CHECK: memory=SIZE, disk=FOLDER:SIZE, bandwidth=SIZE, command=COMMAND, or a URL. "
    "Repeatable.",
)
@click.option(
    "--check-pause",
    type=options.Seconds(),
    default=REFUSED_PAUSE,
    show_default=True,
    help="Pause before the next start of a group whose machine failed. It doubles with each time in a row, up to 1 h.",
)
@click.option("--cold", is_flag=True, help="Start each rank as a new Python. Default: restarts have imports done.")
@click.option(
    "--preload",
    multiple=True,
    metavar="MODULE",
    help="Module to import ahead for restarts, in addition to those that are learned. Repeatable.",
)
@options.lighthouse_option
@options.job_option
@options.token_option
@options.tls_options
@click.option(
    "--min-replicas",
    type=click.IntRange(1),
    help="For the lighthouse started here: minimum number of groups.  [default: 1]",
)
@click.option(
    "--join-timeout",
    type=options.Seconds(),
    help="For the lighthouse started here: maximum wait for groups that have not asked.  [default: 60]",
)
@click.option(
    "--refuse-going-back",
    is_flag=True,
    help="For the lighthouse started here: refuse to begin again at an earlier step after all groups were lost.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="For the lighthouse started here: folder for its state and events.jsonl.  [default: deleted at the end]",
)
@click.option(
    "--first-replica",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number of the first group on this machine, for a job on several machines.",
)
@click.option(
    "--replicas-in-job",
    type=click.IntRange(1),
    help="Number of groups on all machines, without spares.  [default: --replicas]",
)
@click.option("--spares-in-job", type=click.IntRange(0), help="Number of spares on all machines.  [default: --spares]")
@click.option(
    "--nnodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Machines of the group. Run this command on each of them, with the same --first-replica and --replicas 1.",
)
@click.option(
    "--node-rank",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number of this machine in its group. Machine 0 has rank 0.",
)
@click.option("--master-addr", metavar="HOST", help="Machine 0, for the other machines of the group.")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    default=29500,
    show_default=True,
    help="Port on machine 0 for the store where the ranks of the group find each other.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a file with the output of each rank, and run.log.  [default: no files]",
)
@click.option("--timestamps", is_flag=True, help="Begin each line of output with the time.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    program: str,
    arguments: tuple[str, ...],
    *,
    replicas: int,
    nproc_per_replica: int,
    gpus_per_replica: int | None,
    max_restarts: int,
    max_restart_pause: float,
    hang_after: float | None,
    final_code: int | None,
    grace: float,
    spares: int,
    notice: float,
    check: bool,
    checks: tuple[str, ...],
    check_pause: float,
    cold: bool,
    preload: tuple[str, ...],
    addresses: str | None,
    job: str,
    token_file: Path | None,
    tls: TlsFiles,
    min_replicas: int | None,
    join_timeout: float | None,
    refuse_going_back: bool,
    state_dir: Path | None,
    first_replica: int,
    replicas_in_job: int | None,
    spares_in_job: int | None,
    nnodes: int,
    node_rank: int,
    master_addr: str | None,
    master_port: int,
    log_dir: Path | None,
    timestamps: bool,
) -> None:
    """Run replica groups of a script and restart those that die.

    keepstep run --replicas 3 -- train.py --epochs 10

    Each rank gets torchrun's environment. Its output is printed as "[r0/1] line" (group, rank). A rank that dies ends
    its group, which restarts after a short pause; an evicted group restarts when its ban is over. A group whose ranks
    all exit with 0 is finished. Ctrl-C ends all groups cleanly, a second one at once. Without --lighthouse the command
    starts a lighthouse for the job. With --spares, groups that are lost are replaced without a start of Python. Groups
    restart from a process that has done their imports (--cold: they do not). With --check, a group joins only from a
    machine that passes its checks. With --nnodes, the ranks of a group are on several machines.

    Exit code: 0 all groups finished; 1 a group was given up after its restarts, or died after others had finished; 85
    it was given up because its machine failed its checks;
    65, 76, and 78 to 83 a group ended with this code, and a new start would end the same; 128 + n ended by signal n. A
    group that came back too late to finish (80) does not count if another one here finished.
    """
    import asyncio
    import os
    import tempfile
    from functools import partial

    from keepstep_cli.asking.rest import Lighthouse, read_token
    from keepstep_cli.running import embedded
    from keepstep_cli.running.bans import ask_ban, ask_job, name_at_lighthouse
    from keepstep_cli.running.console.console_audience import ConsoleAudience
    from keepstep_cli.running.ends.end_reports import EndReports
    from keepstep_cli.running.heal_notes import follow_heals
    from keepstep_cli.running.launcher import Launcher, Program, replica_programs, stop_on_signals
    from keepstep_cli.running.ranks import JobSpec, command_line, program_problem
    from keepstep_cli.running.run_control import accepting_orders
    from keepstep_cli.running.silent_ranks import LOCKED_SECONDS
    from keepstep_mesh.checks.preflight_settings import PreflightSettings
    from keepstep_mesh.exit_codes import ENDS_THE_SAME
    from keepstep_mesh.protocol import names
    from keepstep_mesh.security.tls import TlsError

    if (problem := program_problem(program)) is not None:
        raise click.UsageError(problem)
    checks = ("builtin", *checks) if check or checks else ()
    try:
        PreflightSettings.parsed(checks)
    except ValueError as error:
        raise click.UsageError(f"--check-with: {error}") from error
    if cold and preload:
        raise click.UsageError("--cold starts nothing warm, so --preload has no effect: give one of them")
    if (problem := names.problem(job, "job")) is not None:
        raise click.UsageError(f"--job: {problem}")
    if addresses and (min_replicas or join_timeout is not None or refuse_going_back):
        raise click.UsageError(
            f"--min-replicas, --join-timeout and --refuse-going-back are for the lighthouse that is started here, but "
            f"{addresses} is used: "
            f"give them to that one, or unset KEEPSTEP_LIGHTHOUSE"
        )
    in_job = spares if spares_in_job is None else spares_in_job
    _check_numbers(replicas, spares, first_replica, replicas_in_job, in_job, min_replicas)
    if node_rank >= nnodes:
        raise click.UsageError(f"--node-rank {node_rank} must be below --nnodes {nnodes}")
    if nnodes > 1:
        _check_machines(nnodes, replicas + spares, master_addr, addresses)
    if (told_spares := os.environ.get("KEEPSTEP_SPARES", "")) not in ("", str(in_job)):
        raise click.UsageError(
            f"KEEPSTEP_SPARES={told_spares} is set, and the job has {in_job} spares: pass --spares-in-job, "
            f"which sets it for the groups, and unset it here"
        )
    token = read_token(token_file)
    try:
        tls.client_context()
    except TlsError as error:
        raise click.UsageError(str(error)) from error
    audience = ConsoleAudience(timestamps=timestamps, log_dir=log_dir)
    gpus = _gpus_of_groups(replicas + spares, nproc_per_replica, gpus_per_replica, audience)
    if addresses:
        _ask_first(Lighthouse(addresses, token, tls, timeout=5.0), job, audience)
    programs: list[Program] = []
    try:
        temporary = tempfile.TemporaryDirectory(prefix="keepstep-")
    except OSError as error:  # a full disk, or one that is read only
        raise click.ClickException(f"{error.strerror}; set TMPDIR to a folder that can be written") from error
    with temporary as forgotten:
        if not addresses:
            port, other = embedded.place()
            if other is not None:
                audience.note("run", f"not using the lighthouse at {other}; to use it, pass --lighthouse {other}")
            addresses = f"http://127.0.0.1:{port}"
            flags = ["--initial-replicas", str(replicas_in_job or replicas)]
            flags += [] if min_replicas is None else ["--min-replicas", str(min_replicas)]
            flags += [] if join_timeout is None else ["--join-timeout", str(join_timeout)]
            flags += [] if hang_after is None else ["--hang-after", str(hang_after)]
            flags += ["--refuse-going-back", "true"] if refuse_going_back else []
            folder = options.make_folder(state_dir or Path(forgotten))
            programs.append(embedded.lighthouse_program(port, folder, os.environ, tuple(flags)))
            audience.note(embedded.NAME, f"{addresses}; ask it with `keepstep status --lighthouse {addresses}`")
        told = Path(forgotten) / "names"
        told.mkdir()
        imports = None if cold else Path(forgotten) / "imports"
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
            imports=imports,
            spares=spares,
            spares_in_job=in_job,
            notice=notice,
            gpus=gpus,
            checks=checks,
            nnodes=nnodes,
            node_rank=node_rank,
            master=(master_addr, master_port) if nnodes > 1 and master_addr else None,
        )
        groups = replica_programs(spec, os.environ)
        local = [one.spec.name for one in groups]
        lighthouse = Lighthouse(addresses, token, tls)
        bans = partial(ask_ban, lighthouse, job, told)
        how_far = partial(ask_job, lighthouse, job, START_SECONDS if programs else 0.0)

        async def launch() -> int:
            backoff = replace(RESTART_BACKOFF, most=max_restart_pause)
            limits = Restarts(
                max_restarts=max_restarts, backoff=backoff, grace=notice + grace, refused_pause=check_pause
            )
            silent_after = LOCKED_SECONDS if hang_after is None else hang_after
            ends = EndReports(lighthouse, job, told, audience.note)
            asks = bans, how_far, imports, preload, silent_after
            launcher = Launcher([*programs, *groups], limits, audience, *asks, ends)

            def facts() -> dict[str, Any]:
                return {"processes": launcher.pids(), "names": {one: name_at_lighthouse(told, one) for one in local}}

            telling = [
                asyncio.create_task(follow_heals(lighthouse, job, local, told, launcher.note, ends.told)),
                asyncio.create_task(ends.run()),
            ]
            try:
                with stop_on_signals(launcher):
                    async with accepting_orders(job, local, launcher.restart, facts):
                        return await launcher.run()
            finally:
                for one in telling:
                    one.cancel()
                await asyncio.wait(telling)
                await ends.close()
                audience.close()

        code = asyncio.run(launch())
        sys.exit(code if final_code is None or code not in ENDS_THE_SAME else final_code)


def _check_numbers(
    replicas: int, spares: int, first: int, in_job: int | None, spares_in_job: int, min_replicas: int | None
) -> None:
    """Check the numbers of groups. Raises ``click.UsageError``."""
    if spares > spares_in_job:
        raise click.UsageError(f"--spares {spares} exceeds --spares-in-job {spares_in_job}, which counts them too")
    groups = in_job or first + replicas
    last, end = first + replicas + spares - 1, groups + spares_in_job - 1
    if last > end:
        here = f"--replicas {replicas}" + (f" and --spares {spares}" if spares else "")
        whole = f"--replicas-in-job {groups}" + (f" and --spares-in-job {spares_in_job}" if spares_in_job else "")
        raise click.UsageError(
            f"--first-replica {first} and {here} start groups up to r{last}, but {whole} "
            f"{'end' if spares_in_job else 'ends'} at r{end}"
        )
    if min_replicas is not None and min_replicas > groups:
        raise click.UsageError(
            f"--min-replicas {min_replicas} exceeds the {groups} groups of the job: no quorum could form"
        )


def _check_machines(nnodes: int, groups: int, master: str | None, addresses: str | None) -> None:
    """Check the options of a group of several machines. Raises ``click.UsageError``."""
    if groups > 1:
        raise click.UsageError(f"--nnodes {nnodes} is for one group, and {groups} are started here: pass --replicas 1")
    if not master or not addresses:
        raise click.UsageError(
            f"--nnodes {nnodes} needs --master-addr, the machine of rank 0, and --lighthouse, which all of them reach"
        )


def _gpus_of_groups(groups: int, ranks: int, each: int | None, audience: ConsoleAudience) -> tuple[str, ...]:
    """Return ``CUDA_VISIBLE_DEVICES`` of each group; empty: unchanged. Raises ``click.UsageError``."""
    import os

    from keepstep_cli.running.gpus import advice, divide, visible_gpus

    gpus = visible_gpus(os.environ)
    if each is None:
        if (sentence := advice(gpus, groups)) is not None:
            audience.note("run", sentence)
        return ()
    if each < ranks:
        raise click.UsageError(
            f"--gpus-per-replica {each} is below --nproc-per-replica {ranks}: each rank needs a GPU of its own"
        )
    try:
        return tuple(divide(gpus, groups, each))
    except ValueError as error:
        raise click.UsageError(f"--gpus-per-replica: {error}") from error


def _ask_first(lighthouse: Lighthouse, job: str, audience: ConsoleAudience) -> None:
    """Ask the lighthouse, and raise its refusal. Note if the job is finished.

    An unreachable lighthouse is no error: trainers wait for it.
    """
    import asyncio

    from keepstep_cli.errors import Refused, Unreachable

    try:
        jobs = asyncio.run(lighthouse.get("jobs"))["jobs"]
    except (Refused, Unreachable) as error:
        if not error.may_pass:
            raise
        for line in error.message.splitlines():
            audience.note("run", line)
        audience.note("run", "starting the groups, which wait for it (connect_timeout)")
        return
    known: dict[str, Any] = next((one for one in jobs if one["job"] == job), {})
    step = known.get("finished_step", 0)
    if known.get("closed"):
        audience.note(
            "run",
            f"job {job} is closed: all its groups finished at step {step}; to train on from there, reopen it (keepstep "
            f"job reopen {job}); to begin again, delete it (keepstep job rm {job}), or give another --job",
        )
    elif step:
        audience.note(
            "run",
            f"job {job} finished at step {step}: only groups with a checkpoint near that step may go on with it; to "
            f"begin again, delete it (keepstep job rm {job}), or give another --job",
        )
