"""``keepstep up`` and ``keepstep lighthouse``: run services in this process until a signal ends them."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep_cli.asking.defaults import DEFAULT_PORT
from keepstep_cli.asking.options import Seconds, all_of, make_folder
from keepstep_cli.asking.policy_options import new_job_policy
from keepstep_cli.asking.sections import SectionedCommand
from keepstep_cli.running.service_options import FILE, service_options
from keepstep_cli.running.services import announce, checked, configure_logs, importing, reported
from keepstep_mesh.protocol.policy import SETTINGS

if TYPE_CHECKING:
    from keepstep_mesh.serving.process import Hosted
    from keepstep_mesh.serving.service import Endpoint, Service

RELAY_PORTS_ABOVE, METRICS_PORTS_ABOVE = 10, 20
SETTING = re.compile(rf"^(bind|store|lease|advertise)\b|\b({'|'.join(SETTINGS)})\b")
"""Pattern of a setting's name in an error of the lighthouse."""

_event_log_option = click.option("--event-log", type=FILE, help="File to append every event to, as a line of JSON.")

_job_options = all_of(
    new_job_policy,
    click.option("--max-jobs", type=click.IntRange(1), help="Maximum number of jobs.  [default: 1000]"),
    # Spellings of torchft_lighthouse. The last one has no effect: this lighthouse does not poll.
    click.option("--join_timeout_ms", type=float, hidden=True),
    click.option("--heartbeat_timeout_ms", type=float, hidden=True),
    click.option("--quorum_tick_ms", type=float, hidden=True),
)


SECTIONS = {
    "Addresses": ("--bind", "--relay-bind", "--metrics-bind", "--advertise", "--allow-host", "--insecure"),
    "Tokens and TLS": ("--token-file", "--tls-cert", "--tls-key", "--tls-ca"),
    "State and logs": ("--state-dir", "--store", "--lease", "--event-log", "--log-format", "--log-level"),
    "Policy of new jobs: quorums": ("--min-replicas", "--max-replicas", "--initial-replicas", "--join-timeout"),
    "Policy of new jobs: failures": (
        "--heartbeat-timeout",
        "--reconnect-grace",
        "--takeover-grace",
        "--heal-timeout",
        "--drain-straggler-after",
    ),
    "Policy of new jobs: equal weights and the end": (
        "--verify-every",
        "--on-divergence",
        "--refuse-going-back",
        "--finish-grace",
        "--hang-after",
        "--job-ttl",
        "--max-jobs",
    ),
}


@click.command(
    cls=SectionedCommand, sections=SECTIONS, short_help="Run a lighthouse, which forms the quorum of each step."
)
@service_options(DEFAULT_PORT)
@_event_log_option
@click.option(
    "--store",
    metavar="URL",
    help="Store: memory://, sqlite:///path, or etcd://host:port[,host:port]/prefix, which several lighthouses "
    "share: one leads, the others are standbys.  [default: memory://]",
)
@click.option(
    "--lease",
    type=Seconds(),
    help="With etcd: take over from a leader that is silent for this time; at least 3.  [default: 10]",
)
@click.option(
    "--advertise", metavar="URL", help="With etcd: address of this lighthouse for others.  [default: where it listens]"
)
@_job_options
def lighthouse(**flags: Any) -> None:
    """Run a lighthouse, which forms the quorum of each step of each job.

    Times are seconds, or 500ms, 2m. Every flag is also a variable: --join-timeout is KEEPSTEP_LIGHTHOUSE_JOIN_TIMEOUT.
    """
    _serve(flags)


@click.command(
    cls=SectionedCommand,
    sections=SECTIONS,
    short_help="Run the whole mesh (lighthouse, relay, metrics) in this process.",
)
@service_options(DEFAULT_PORT)
@_event_log_option
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".keepstep"),
    show_default=True,
    help="Folder for the state and the event log.",
)
@click.option(
    "--relay-bind",
    metavar="HOST:PORT",
    help="Address of the relay.  [default: ten ports above the lighthouse]",
)
@click.option(
    "--metrics-bind",
    metavar="HOST:PORT",
    help="Address of the metrics service.  [default: twenty ports above the lighthouse]",
)
@_job_options
def up(state_dir: Path, relay_bind: str | None, metrics_bind: str | None, **flags: Any) -> None:
    """Run a lighthouse, a relay, and a metrics service in this process, with their state in a folder.

    Accepts the flags and variables of `keepstep lighthouse`, and the variables of `keepstep relay` and `keepstep
    metrics`.
    """
    from keepstep_mesh.config.settings import from_environment

    flags["store"] = f"sqlite://{state_dir / 'lighthouse.sqlite'}"
    if flags["event_log"] is None and from_environment("LIGHTHOUSE_EVENT_LOG") is None:
        flags["event_log"] = state_dir / "events.jsonl"
    shared = ("token_file", "tls_cert", "tls_key", "tls_ca", "insecure", "allow_host")
    same = {name: flags[name] for name in shared}
    of_relay = same | {"bind": relay_bind, "data_dir": state_dir / "relay"}
    of_metrics = same | {"bind": metrics_bind, "data_dir": state_dir / "metrics"}
    _serve(flags, state_dir, (of_relay, of_metrics))


def _serve(
    flags: dict[str, Any], state_dir: Path | None = None, beside: tuple[dict[str, Any], dict[str, Any]] | None = None
) -> None:
    """Run a lighthouse until a signal, with ``beside`` also a relay and a metrics service, of which it has the flags.

    At the end delete ``state_dir`` if this call created it and it is empty.
    """
    with importing("a lighthouse"):
        from keepstep_lighthouse.app import hosted_lighthouse
        from keepstep_lighthouse.settings import read_settings
        from keepstep_mesh.serving.process import run_services
        from keepstep_mesh.telemetry.tracing.exporting import exporting_service
    from keepstep_mesh.errors import KeepstepError

    configure_logs(flags)
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
    listens: list[Endpoint] = []

    def started(endpoint: Endpoint) -> None:
        listens.append(endpoint)
        _announce(endpoint)

    try:
        with reported(), exporting_service("lighthouse" if beside is None else "up"):
            hosted = [hosted_lighthouse(settings, started)]
            if beside is not None:
                hosted.append(_relay_beside(settings.bind, listens, beside[0]))
                hosted.append(_metrics_beside(settings.bind, listens, beside[1]))
            run_services(hosted)
    finally:
        if made is not None:
            with contextlib.suppress(OSError):  # not empty
                made.rmdir()


def _relay_beside(bind: str, lighthouse: list[Endpoint], flags: dict[str, Any]) -> Hosted:
    """Run a relay that registers with ``lighthouse``, which will listen on ``bind``."""
    from keepstep_relay.app import Relay, hosted_relay
    from keepstep_relay.settings import read_settings

    _bind_above(bind, RELAY_PORTS_ABOVE, "RELAY_BIND", flags)
    settings = checked(read_settings, flags, "--relay-bind")

    def service() -> Service:
        return Relay(replace(settings, lighthouses=(lighthouse[0].near_url,))).service()

    return replace(hosted_relay(settings, partial(announce, "relay")), service=service)


def _metrics_beside(bind: str, lighthouse: list[Endpoint], flags: dict[str, Any]) -> Hosted:
    """Run a metrics service in the same way."""
    from keepstep_metrics.app import Metrics, hosted_metrics
    from keepstep_metrics.settings import read_settings

    _bind_above(bind, METRICS_PORTS_ABOVE, "METRICS_BIND", flags)
    settings = checked(read_settings, flags, "--metrics-bind")

    def service() -> Service:
        return Metrics(replace(settings, lighthouses=(lighthouse[0].near_url,))).service()

    return replace(hosted_metrics(settings, _announce_metrics), service=service)


def _bind_above(bind: str, above: int, variable: str, flags: dict[str, Any]) -> None:
    """Return the address of a service beside the lighthouse on ``bind``, unless the environment sets one."""
    from keepstep_mesh.config.settings import bind_address, from_environment
    from keepstep_mesh.net.addresses import in_url

    host, port = bind_address(bind)
    if flags["bind"] is None and from_environment(variable) is None:
        flags["bind"] = f"{in_url(host)}:{port + above if port else 0}"


def _announce_metrics(endpoint: Endpoint) -> None:
    announce("metrics", endpoint)
    print(f"dashboard {endpoint.near_url}/", flush=True)


def _announce(endpoint: Endpoint) -> None:
    """Print one line to standard output, for scripts that wait for it."""
    announce("lighthouse", endpoint)
    if sys.stdout.isatty():
        print(f"train with: keepstep run --lighthouse {endpoint.url} --replicas 2 -- train.py", flush=True)
