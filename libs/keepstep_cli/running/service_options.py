"""The options of every command that runs a service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from keepstep_cli.asking.options import Command, all_of

FILE = click.Path(dir_okay=False, path_type=Path)
FILE_THERE = click.Path(exists=True, dir_okay=False, path_type=Path)


def service_options(port: int) -> Callable[[Command], Command]:
    return all_of(
        click.option(
            "--bind",
            metavar="HOST:PORT",
            help=f"Listening address; port 0: any free port.  [default: 127.0.0.1:{port}]",
        ),
        click.option(
            "--token-file", type=FILE_THERE, help="File with lines `role [name] = token` for worker, service, admin."
        ),
        click.option(
            "--tls-cert", type=FILE_THERE, help="Certificate (PEM), followed by intermediate ones; enables https."
        ),
        click.option("--tls-key", type=FILE_THERE, help="Key of the certificate (PEM), if it is in another file."),
        click.option("--tls-ca", type=FILE_THERE, help="Require client certificates of this CA (PEM): mutual TLS."),
        click.option("--insecure", is_flag=True, default=None, help="Listen beyond this machine without a token."),
        click.option(
            "--allow-host",
            metavar="NAME[,NAME]",
            help="On loopback without tokens: accept requests to these names, too, and not only to localhost.",
        ),
        click.option(
            "--log-format",
            type=click.Choice(["auto", "console", "json"]),
            default="auto",
            show_default=True,
            help="auto: text on a terminal, else JSON.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="info",
            show_default=True,
            help="Level of logs on standard error.",
        ),
    )
