"""``python -m keepstep_lighthouse``: the lighthouse as a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.events import Policy
from keepstep_lighthouse.settings import LighthouseSettings, read_like, read_settings
from keepstep_mesh import logging, service
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.service import Endpoint, Hosted
from keepstep_mesh.settings import bind_address, duration


def hosted_lighthouse(settings: LighthouseSettings, started: Callable[[Endpoint], None] | None = None) -> Hosted:
    """For ``service.run_several``. Raises ``ValueError``. ``started`` is told where it listens."""
    host, port = bind_address(settings.bind)
    return Hosted(
        Lighthouse(settings).service,
        host,
        port,
        settings.tokens,
        settings.tls,
        settings.insecure,
        started or (lambda _: None),
    )


def run_lighthouse(settings: LighthouseSettings, started: Callable[[Endpoint], None] | None = None) -> None:
    """Runs until SIGTERM or SIGINT. Raises ``KeepstepError`` or ``ValueError`` that says what to do."""
    service.raise_descriptor_limit()
    service.run_several([hosted_lighthouse(settings, started)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m keepstep_lighthouse", description="Forms the quorums of training jobs.")
    parser.add_argument("--bind", help="host:port to listen on (127.0.0.1:29510)")
    parser.add_argument("--store", help="memory://, sqlite:///path or etcd://host:port/prefix (memory://)")
    parser.add_argument("--lease", type=duration, help="with etcd: a leader not heard of for so long is succeeded (10)")
    parser.add_argument(
        "--advertise", help="with etcd: http://host:port where others reach this one (where it listens)"
    )
    parser.add_argument("--event-log", type=Path, help="file that gets every event as a line of JSON")
    parser.add_argument("--token-file", type=Path, help="lines `role = token` for worker, service, admin")
    parser.add_argument("--tls-cert", type=Path, help="PEM: its certificate; then it speaks https only")
    parser.add_argument("--tls-key", type=Path, help="PEM: the key, if it is not in the file of the certificate")
    parser.add_argument("--tls-ca", type=Path, help="PEM: who connects must show a certificate of this CA")
    parser.add_argument("--insecure", action="store_true", default=None, help="listen beyond loopback without a token")
    for one in fields(Policy):
        flag = f"--{one.name.replace('_', '-')}"
        parser.add_argument(flag, type=read_like(one.default), help=f"policy of new jobs ({one.default})")
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error")
    return parser


def main(arguments: list[str] | None = None) -> int:
    flags = vars(_parser().parse_args(arguments))
    try:
        logging.configure(level=flags.pop("log_level"))
        run_lighthouse(read_settings(flags))
    except (KeepstepError, ValueError) as error:
        print(f"keepstep lighthouse: {error}", file=sys.stderr)  # noqa: T201 - the last word of a command
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
