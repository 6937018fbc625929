"""The options that many commands share, and how they are read: flag, then environment, then default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

DEFAULT_PORT = 29510
DEFAULT_LIGHTHOUSE = f"http://127.0.0.1:{DEFAULT_PORT}"

Command = TypeVar("Command", bound=Callable[..., Any])


def lighthouse_option(command: Command) -> Command:
    return click.option(
        "--lighthouse",
        "addresses",
        envvar=["KEEPSTEP_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"],
        metavar="URL[,URL]",
        help="Lighthouse, or several separated by commas.  [env: KEEPSTEP_LIGHTHOUSE, TORCHFT_LIGHTHOUSE]",
    )(command)


def job_option(command: Command) -> Command:
    return click.option(
        "--job",
        envvar="KEEPSTEP_JOB",
        default="default",
        show_default=True,
        help="Name of the job.  [env: KEEPSTEP_JOB]",
    )(command)


def token_option(command: Command) -> Command:
    return click.option(
        "--token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="KEEPSTEP_TOKEN_FILE",
        help="File whose first line is the bearer token; else KEEPSTEP_TOKEN.  [env: KEEPSTEP_TOKEN_FILE]",
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")(command)
