"""``keepstep up`` and ``keepstep lighthouse``: services in this process, until a signal ends them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep_cli.errors import Missing
from keepstep_cli.options import DEFAULT_PORT, Seconds, make_folder
from keepstep_cli.service_options import FILE, all_of, service_options

if TYPE_CHECKING:
    from keepstep_mesh.service import Endpoint

_event_log_option = click.option("--event-log", type=FILE, help="File that gets every event as a line of JSON.")

_policy_options = all_of(
    click.option("--min-replicas", "--min_replicas", type=int, help="Groups that a step needs at least.  [default: 1]"),
    click.option("--max-replicas", type=int, help="Groups that take part at most; 0: no limit.  [default: 0]"),
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


@click.command()
@service_options(DEFAULT_PORT)
@_event_log_option
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
@service_options(DEFAULT_PORT)
@_event_log_option
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
    flags["store"] = f"sqlite://{make_folder(state_dir) / 'lighthouse.sqlite'}"
    flags["event_log"] = flags["event_log"] or state_dir / "events.jsonl"
    _serve(flags)


def _serve(flags: dict[str, Any]) -> None:
    try:
        from keepstep_lighthouse.__main__ import run_lighthouse
        from keepstep_lighthouse.settings import read_settings
    except ImportError as error:
        raise Missing(f"a lighthouse needs {error.name}: pip install 'keepstep[services]'") from error
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
        run_lighthouse(read_settings(flags), _announce)
    except (KeepstepError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _announce(endpoint: Endpoint) -> None:
    """One line on standard output, for scripts that wait for it."""
    print(f"lighthouse {endpoint.url}", flush=True)
    if sys.stdout.isatty():
        print(f"train with: keepstep run --lighthouse {endpoint.url} --replicas 2 -- train.py", flush=True)
