"""``keepstep up`` and ``keepstep lighthouse``: services in this process, until a signal ends them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep_cli.errors import Missing
from keepstep_cli.options import DEFAULT_PORT, Command, Seconds, make_folder

if TYPE_CHECKING:
    from keepstep_mesh.service import Endpoint

FILE = click.Path(dir_okay=False, path_type=Path)
FILE_THERE = click.Path(exists=True, dir_okay=False, path_type=Path)
NAMES = (
    "min_replicas",
    "max_replicas",
    "initial_replicas",
    "join_timeout",
    "heal_timeout",
    "heartbeat_timeout",
    "reconnect_grace",
    "takeover_grace",
)
SETTING = re.compile(rf"^(bind|store|lease|advertise)\b|\b({'|'.join(NAMES)})\b")
"""A setting as the lighthouse calls it in what it says of it."""


def _apply(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def apply(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


_service_options = _apply(
    click.option("--bind", metavar="HOST:PORT", help=f"Where to listen.  [default: 127.0.0.1:{DEFAULT_PORT}]"),
    click.option("--event-log", type=FILE, help="File that gets every event as a line of JSON."),
    click.option(
        "--token-file", type=FILE_THERE, help="File with lines `role [name] = token` for worker, service, admin."
    ),
    click.option(
        "--tls-cert", type=FILE_THERE, help="Its certificate (PEM), the intermediate ones after it: https only."
    ),
    click.option("--tls-key", type=FILE_THERE, help="The key of the certificate (PEM), if it is not in the same file."),
    click.option(
        "--tls-ca", type=FILE_THERE, help="Who connects must show a certificate of this CA (PEM): mutual TLS."
    ),
    click.option("--insecure", is_flag=True, default=None, help="Listen beyond this machine without a token."),
    click.option(
        "--log-format",
        type=click.Choice(["auto", "console", "json"]),
        default="auto",
        show_default=True,
        help="auto: for people on a terminal, else JSON.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="What is logged, to standard error.",
    ),
)

_policy_options = _apply(
    click.option(
        "--min-replicas",
        "--min_replicas",
        type=click.IntRange(1),
        help="Groups that a step needs at least.  [default: 1]",
    ),
    click.option(
        "--max-replicas", type=click.IntRange(0), help="Groups that take part at most; 0: no limit.  [default: 0]"
    ),
    click.option(
        "--initial-replicas",
        type=click.IntRange(0),
        help="Groups that the first step of a job waits for, up to the join timeout.  [default: 0]",
    ),
    click.option("--join-timeout", type=Seconds(), help="Wait so long for groups that have not asked.  [default: 60]"),
    click.option("--heal-timeout", type=Seconds(), help="Wait so long for a group that heals.  [default: 60]"),
    click.option("--heartbeat-timeout", type=Seconds(), help="A group silent for so long is lost.  [default: 5]"),
    click.option(
        "--reconnect-grace",
        type=Seconds(),
        help="A group whose connection broke may come back for so long.  [default: 0.2]",
    ),
    click.option(
        "--takeover-grace",
        type=Seconds(),
        help="After a restart nobody is judged dead for so long.  [default: the heartbeat timeout]",
    ),
    # As torchft_lighthouse spells them; a lighthouse that does not poll has no use for the last one.
    click.option("--join_timeout_ms", type=float, hidden=True),
    click.option("--heartbeat_timeout_ms", type=float, hidden=True),
    click.option("--quorum_tick_ms", type=float, hidden=True),
)


@click.command(short_help="Run a lighthouse, which forms the quorum of each step.")
@_service_options
@click.option(
    "--store",
    metavar="URL",
    help="What must survive: memory://, sqlite:///path, or etcd://host:port[,host:port]/prefix, which several "
    "lighthouses share: one leads, the others stand by.  [default: memory://]",
)
@click.option("--lease", type=Seconds(), help="With etcd: succeed a leader not heard of for so long.  [default: 10]")
@click.option(
    "--advertise", metavar="URL", help="With etcd: where others reach this lighthouse.  [default: where it listens]"
)
@_policy_options
def lighthouse(**flags: Any) -> None:
    """Run a lighthouse: it agrees with all groups of a job on who takes part in each step.

    Times are seconds, or 500ms, 2m. Every flag is also a variable: --join-timeout is KEEPSTEP_LIGHTHOUSE_JOIN_TIMEOUT.
    """
    _serve(flags)


@click.command()
@_service_options
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".keepstep"),
    show_default=True,
    help="Folder for the state and the event log.",
)
@_policy_options
def up(state_dir: Path, **flags: Any) -> None:
    """Run the whole mesh in this process. What must survive a restart is kept in a folder.

    Takes the flags and variables of `keepstep lighthouse`.
    """
    flags["store"] = f"sqlite://{state_dir / 'lighthouse.sqlite'}"
    flags["event_log"] = flags["event_log"] or state_dir / "events.jsonl"
    _serve(flags, state_dir)


def _serve(flags: dict[str, Any], state_dir: Path | None = None) -> None:
    """``state_dir`` is there while it runs, and is not left behind empty."""
    try:
        from keepstep_lighthouse.__main__ import run_lighthouse
        from keepstep_lighthouse.settings import read_settings
    except ImportError as error:
        raise Missing(f"a lighthouse needs {error.name}: pip install -e '.[services]' in keepstep's folder") from error
    from keepstep_mesh import logging
    from keepstep_mesh.errors import KeepstepError

    as_json = {"json": True, "console": False}.get(flags.pop("log_format"))
    logging.configure(flags.pop("log_level"), as_json=as_json)
    flags.pop("quorum_tick_ms")
    for name in ("join_timeout", "heartbeat_timeout"):
        milliseconds = flags.pop(f"{name}_ms")
        if milliseconds is not None and flags[name] is None:
            flags[name] = milliseconds / 1000
    try:
        settings = read_settings(flags)
    except (KeepstepError, ValueError) as error:
        raise click.UsageError(SETTING.sub(lambda found: f"--{found[0].replace('_', '-')}", str(error))) from error
    made = make_folder(state_dir) if state_dir is not None and not state_dir.exists() else None
    try:
        run_lighthouse(settings, _announce)
    except (KeepstepError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        if made is not None:
            with contextlib.suppress(OSError):  # there is something in it
                made.rmdir()


def _announce(endpoint: Endpoint) -> None:
    """One line on standard output, for scripts that wait for it."""
    print(f"lighthouse {endpoint.url}", flush=True)
    if sys.stdout.isatty():
        print(f"train with: keepstep run --lighthouse {endpoint.url} --replicas 2 -- train.py", flush=True)
