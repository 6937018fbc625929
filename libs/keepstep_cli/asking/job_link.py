"""The job that a command is about, and the lighthouse or relay that it asks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep_cli.asking.options import client_options
from keepstep_cli.asking.rest import Lighthouse, Relay, read_token, run
from keepstep_cli.errors import Unreachable

if TYPE_CHECKING:
    from keepstep_mesh.security.tls import TlsFiles
    from keepstep_mesh.security.tokens import ClientToken

Connect = Callable[..., Lighthouse]


@dataclass(frozen=True, slots=True)
class JobLink:
    """One job at a lighthouse or a relay, and how to print answers."""

    service: Lighthouse
    job: str
    as_json: bool

    def get(self, *path: str, **query: int | str) -> Any:
        """GET ``path`` below the job."""
        return run(self.service.get("jobs", self.job, *path, **query))

    def post(self, *path: str, **body: Any) -> Any:
        """POST ``path`` below the job."""
        return run(self.service.post("jobs", self.job, *path, **body))


@dataclass(frozen=True, slots=True)
class JobAtRelay(JobLink):
    """One job at a relay."""

    service: Relay


def show_json(answer: Any) -> None:
    """Print ``answer`` as indented JSON."""
    print(json.dumps(answer, indent=2))


def with_lighthouse(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` the options of a client, and a ``JobLink`` to the lighthouse as its first argument."""
    return client_options(_linked(command, Lighthouse))


def with_relay(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` the options of a client and ``--relay``, and a ``JobAtRelay``."""
    return relay_option(client_options(_linked(command, connect_relay, JobAtRelay)))


relay_option = click.option(
    "--relay",
    "relays",
    envvar="KEEPSTEP_RELAY",
    metavar="URL[,URL]",
    help="The relay.  [env: KEEPSTEP_RELAY; default: the relays that the lighthouse knows]",
)


def _linked(
    command: Callable[..., None], connect: Connect, link: Callable[..., JobLink] = JobLink
) -> Callable[..., None]:
    @functools.wraps(command)
    def run_linked(
        *, addresses: str | None, token_file: Path | None, tls: TlsFiles, job: str, as_json: bool, **others: Any
    ) -> None:
        of_relay = {"relays": others.pop("relays")} if "relays" in others else {}
        service = connect(addresses, read_token(token_file), tls, **of_relay)
        command(link(service, job, as_json), **others)

    return run_linked


def connect_relay(addresses: str | None, token: ClientToken, tls: TlsFiles, relays: str | None) -> Relay:
    """Return the relay of the flag or variable, else those that the lighthouse knows."""
    if relays is not None:
        return Relay(relays, token, tls)
    services = run(Lighthouse(addresses, token, tls).get("cluster"))["services"]
    known = ",".join(one["address"] for one in services if one["kind"] == "relay")
    if not known:
        raise Unreachable(
            f"the lighthouse knows no relay. Start one with {Relay.starts}, or pass its address with {Relay.flags}."
        )
    return Relay(known, token, tls, told=True)
