"""A service as a program of its own (``python -m keepstep_relay``): the flags that all have, and what ``main`` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep_mesh.config import logging
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.serving.process import Hosted, run_services
from keepstep_mesh.serving.service import Endpoint


def parser_of(package: str, description: str, bind: str) -> argparse.ArgumentParser:
    """With the flags of ``ListenSettings``; the service adds its own. ``bind``: where it listens unless said."""
    parser = argparse.ArgumentParser(f"python -m {package}", description=description)
    parser.add_argument("--bind", help=f"host:port to listen on ({bind})")
    parser.add_argument("--advertise", help="http://host:port where others reach it (where it listens)")
    parser.add_argument("--token-file", type=Path, help="lines `role = token` for worker, service, admin")
    parser.add_argument("--tls-cert", type=Path, help="PEM: its certificate; then it speaks https only")
    parser.add_argument("--tls-key", type=Path, help="PEM: the key, if it is not in the file of the certificate")
    parser.add_argument("--tls-ca", type=Path, help="PEM: who connects must show a certificate of this CA")
    parser.add_argument("--insecure", action="store_true", default=None, help="listen beyond loopback without a token")
    parser.add_argument("--allow-host", help="own names on loopback without tokens, beside localhost; comma separated")
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error")
    return parser


def main(
    name: str,
    parser: argparse.ArgumentParser,
    hosted: Callable[[dict[str, Any], Callable[[Endpoint], None]], Hosted],
    arguments: list[str] | None,
) -> int:
    """Runs until SIGTERM or SIGINT; the exit code. ``hosted``: out of the flags, and of what is to be told where it
    listens: that is one line on standard output, for scripts that wait for it.
    """
    flags = vars(parser.parse_args(arguments))
    try:
        logging.configure(level=flags.pop("log_level"))
        run_services([hosted(flags, lambda endpoint: print(f"{name} {endpoint.url}", flush=True))])  # noqa: T201
    except (KeepstepError, ValueError) as error:
        print(f"keepstep {name}: {error}", file=sys.stderr)  # noqa: T201 - the last word of a command
        return 1
    return 0
