"""The place of a checkpoint that a command names: at a relay, or in a directory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep_cli.asking.job_link import connect_relay, relay_option
from keepstep_cli.asking.options import client_options
from keepstep_cli.asking.rest import Relay, read_token, run
from keepstep_cli.errors import Refused, Unreachable

if TYPE_CHECKING:
    from keepstep.relay_client.relay_paths import AtRelay
    from keepstep_mesh.security.tls import TlsFiles
    from keepstep_mesh.security.tokens import ClientToken


@dataclass(frozen=True, slots=True)
class Places:
    """Finds checkpoints by their names."""

    addresses: str | None
    relays: str | None
    token: ClientToken
    tls: TlsFiles
    job: str
    as_json: bool

    def existing(self, name: str) -> str:
        """Return the ``checkpoint_id`` of a checkpoint to read, after a request to its relay.

        Raises:
            Unreachable: no relay answers.
            Refused: no relay has it.
        """
        if (at := _relay_of(name)) is not None:
            run(Relay(at.address, self.token, self.tls).checkpoint(at.job, at.id))
            return name
        if "/" in name:
            return name
        refusals: list[Refused] = []
        with _naming_directories(name):
            for one in self._relays():
                try:
                    run(one.checkpoint(self.job, name))
                    return self._url(one, name)
                except Refused as refusal:
                    if refusal.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                        raise
                    refusals.append(refusal)
            raise refusals[0]

    def at_relay(self, checkpoint_id: str) -> tuple[Relay, str, str] | None:
        """Return the relay, job and name that ``existing`` has found; None for a directory."""
        at = _relay_of(checkpoint_id)
        return None if at is None else (Relay(at.address, self.token, self.tls), at.job, at.id)

    def new(self, name: str) -> str:
        """Return the ``checkpoint_id`` of a checkpoint to save, after a request to its relay.

        Raises:
            Unreachable: no relay answers.
        """
        if (at := _relay_of(name)) is not None:
            run(Relay(at.address, self.token, self.tls).checkpoints(at.job))
            return name
        if "/" in name:
            return name
        with _naming_directories(name):
            one = self._relays()[0]
            run(one.checkpoints(self.job))
            return self._url(one, name)

    def _relays(self) -> list[Relay]:
        return connect_relay(self.addresses, self.token, self.tls, self.relays).each()

    def _url(self, relay: Relay, name: str) -> str:
        from keepstep.relay_client.relay_paths import AtRelay

        return str(AtRelay(relay.address, self.job, name))


@contextmanager
def _naming_directories(name: str) -> Iterator[None]:
    """Add to an error that ``name``, which has no slash, is one at a relay."""
    hint = f"\n{name} names a checkpoint at a relay: for a directory write ./{name}"
    try:
        yield
    except Unreachable as error:
        raise Unreachable(error.message + hint, may_pass=error.may_pass) from error
    except Refused as error:
        raise Refused(error.message + hint, error.status) from error


def _relay_of(name: str) -> AtRelay | None:
    """Return the checkpoint that a URL names; None for any other name."""
    if not name.startswith(("http://", "https://")):
        return None
    from keepstep.relay_client.relay_paths import CHECKPOINT_URL, AtRelay

    try:
        at = AtRelay.parse(name)
    except ValueError as error:
        raise click.UsageError(f"{name}: {error}; expected {CHECKPOINT_URL}") from error
    if at is None:
        raise click.UsageError(f"{name}: expected {CHECKPOINT_URL}")
    return at


def with_places(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` the options of a client and ``--relay``, and ``Places`` as its first argument."""

    @functools.wraps(command)
    def run_with_places(
        *,
        addresses: str | None,
        relays: str | None,
        token_file: Path | None,
        tls: TlsFiles,
        job: str,
        as_json: bool,
        **others: Any,
    ) -> None:
        command(Places(addresses, relays, read_token(token_file), tls, job, as_json), **others)

    return relay_option(client_options(run_with_places))
