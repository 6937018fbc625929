"""The options that commands share: which lighthouse, which job, which token, JSON or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from keepstep_cli.asking.defaults import TLS_FILES
from keepstep_cli.asking.known_names import job_names

Command = TypeVar("Command", bound=Callable[..., Any])


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def apply(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


class Named(click.ParamType[str]):
    """A name, which is not empty."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value) if value else self.fail("it is empty", param, ctx)


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
        envvar=["KEEPSTEP_JOB", "TORCHFT_JOB"],
        type=Named(),
        default="default",
        show_default=True,
        shell_complete=job_names,
        help="Name of the job.  [env: KEEPSTEP_JOB]",
    )(command)


def token_option(command: Command) -> Command:
    return click.option(
        "--token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File that holds the bearer token.  [env: KEEPSTEP_TOKEN, KEEPSTEP_TOKEN_FILE]",
    )(command)


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives ``command`` the TlsFiles of a client as ``tls``, from an option for each of ``TLS_FILES``."""

    @functools.wraps(command)
    def with_tls(*arguments: Any, **others: Any) -> Any:
        from keepstep_mesh.security.tls import tls_of_client

        return command(*arguments, tls=tls_of_client({name: others.pop(name) for name in TLS_FILES}), **others)

    with_options: Callable[..., Any] = with_tls
    for name, meaning in TLS_FILES.items():
        with_options = click.option(
            f"--{name.replace('_', '-')}",
            type=click.Path(dir_okay=False, path_type=Path),
            help=f"{meaning}  [env: KEEPSTEP_{name.upper()}]",
        )(with_options)
    return with_options


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")(command)


client_options = all_of(lighthouse_option, job_option, token_option, tls_options, json_option)
"""Of every command that asks a lighthouse or relay."""


def make_folder(folder: Path) -> Path:
    """``folder``, which is there afterwards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"--state-dir {folder} cannot be made: {error.strerror}") from error
    return folder


class Size(click.ParamType[int]):
    """``8GiB``, ``512M``, ``1000000`` as bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from keepstep_mesh.config.settings import byte_size

        if isinstance(value, int):
            return value
        try:
            return byte_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.ParamType[float]):
    """``60``, ``1.5s``, ``500ms``, ``2m`` as seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from keepstep_mesh.config.settings import duration

        if isinstance(value, int | float):
            return float(value)
        try:
            return duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
