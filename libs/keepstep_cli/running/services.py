"""What the commands that run a service share: logs, checked settings, the line that says where it listens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from keepstep_mesh.serving.service import Endpoint

Settings = TypeVar("Settings")


def configure_logs(flags: dict[str, Any]) -> None:
    """Takes ``log_format`` and ``log_level`` out of ``flags``."""
    from keepstep_mesh.config import logging

    as_json = {"json": True, "console": False}.get(flags.pop("log_format"))
    logging.configure(flags.pop("log_level"), as_json=as_json)


def checked(read: Callable[[Mapping[str, Any]], Settings], flags: dict[str, Any], bind_flag: str) -> Settings:
    """The settings that ``read`` makes of ``flags``. Raises ``click.UsageError`` for invalid ones."""
    from keepstep_mesh.errors import KeepstepError

    try:
        return read(flags)
    except (KeepstepError, ValueError) as error:
        raise click.UsageError(re.sub(r"^bind\b", bind_flag, str(error))) from error


def announce(service: str, endpoint: Endpoint) -> None:
    """Print one line on standard output, for scripts that wait for it."""
    print(f"{service} {endpoint.url}", flush=True)
