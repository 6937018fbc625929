"""Shared code of commands that run a service: imports, logs, settings, the line with its address."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keepstep_cli.errors import Missing

if TYPE_CHECKING:
    from keepstep_mesh.serving.process import Hosted
    from keepstep_mesh.serving.service import Endpoint

Settings = TypeVar("Settings")


@contextlib.contextmanager
def importing(service: str) -> Iterator[None]:
    """Raise ``Missing`` with what to install if a library of ``service`` cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise Missing(f"{service} needs {error.name}: pip install 'keepstep[services]'") from error


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn the errors of a service into messages of the command."""
    from keepstep_mesh.errors import KeepstepError

    try:
        yield
    except (KeepstepError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def run_service(
    name: str,
    flags: dict[str, Any],
    read: Callable[[Mapping[str, Any]], Settings],
    hosted: Callable[[Settings, Callable[[Endpoint], None]], Hosted],
) -> None:
    """Run one service with ``flags`` until SIGTERM or SIGINT."""
    from keepstep_mesh.serving.process import run_services
    from keepstep_mesh.telemetry.tracing.exporting import exporting_service

    configure_logs(flags)
    settings = checked(read, flags, "--bind")
    with reported(), exporting_service(name):
        run_services([hosted(settings, partial(announce, name))])


def configure_logs(flags: dict[str, Any]) -> None:
    """Configure logging with ``log_format`` and ``log_level``, which are removed from ``flags``."""
    from keepstep_mesh.config import logging

    as_json = {"json": True, "console": False}.get(flags.pop("log_format"))
    logging.configure(flags.pop("log_level"), as_json=as_json)


def checked(read: Callable[[Mapping[str, Any]], Settings], flags: dict[str, Any], bind_flag: str) -> Settings:
    """Return the settings that ``read`` makes of ``flags``. Raises ``click.UsageError`` if they are invalid."""
    from keepstep_mesh.errors import KeepstepError

    try:
        return read(flags)
    except (KeepstepError, ValueError) as error:
        raise click.UsageError(re.sub(r"^bind\b", bind_flag, str(error))) from error


def announce(service: str, endpoint: Endpoint) -> None:
    """Print one line on standard output, for scripts that wait for it."""
    print(f"{service} {endpoint.url}", flush=True)
