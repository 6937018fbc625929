"""``python -m keepstep_relay``: the relay as a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from keepstep_mesh import logging, service
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.service import Endpoint, Hosted
from keepstep_mesh.settings import bind_address, byte_size, duration
from keepstep_relay.allocator import keep_freed_memory
from keepstep_relay.app import Relay
from keepstep_relay.settings import LIMITS, RelaySettings, read_settings


def hosted_relay(settings: RelaySettings, started: Callable[[Endpoint], None] | None = None) -> Hosted:
    """For ``service.run_several``. Raises ``ValueError``. ``started`` is told where it listens."""
    host, port = bind_address(settings.bind)
    keep_freed_memory()
    return Hosted(
        lambda: Relay(settings).service(),
        host,
        port,
        settings.tokens,
        settings.tls,
        settings.insecure,
        started or (lambda _: None),
    )


def run_relay(settings: RelaySettings, started: Callable[[Endpoint], None] | None = None) -> None:
    """Runs until SIGTERM or SIGINT. Raises ``KeepstepError`` or ``ValueError`` that says what to do."""
    service.raise_descriptor_limit()
    service.run_several([hosted_relay(settings, started)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m keepstep_relay", description="Passes checkpoints on, and keeps them.")
    parser.add_argument("--bind", help="host:port to listen on (127.0.0.1:29520)")
    parser.add_argument("--memory", type=byte_size, help="size of the memory tier, such as 8GiB (4GiB)")
    parser.add_argument("--data-dir", type=Path, help="folder of the disk tier (none: nothing survives a restart)")
    parser.add_argument("--durable", help="URL of fsspec to which durable checkpoints are copied")
    parser.add_argument("--lighthouse", help="http://host:port[,...] of the lighthouses to register with")
    parser.add_argument("--name", help="under which it registers (host and port)")
    parser.add_argument("--advertise", help="http://host:port where workers reach it (where it listens)")
    parser.add_argument("--max-wait", type=duration, help="longest that a reader waits for what is to come (60)")
    parser.add_argument("--body-timeout", type=duration, help="longest that a chunk may take in or out (60)")
    for name, (_, read) in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=read, help="see docs/relay.md")
    parser.add_argument("--token-file", type=Path, help="lines `role = token` for worker, service, admin")
    parser.add_argument("--tls-cert", type=Path, help="PEM: its certificate; then it speaks https only")
    parser.add_argument("--tls-key", type=Path, help="PEM: the key, if it is not in the file of the certificate")
    parser.add_argument("--tls-ca", type=Path, help="PEM: who connects must show a certificate of this CA")
    parser.add_argument("--insecure", action="store_true", default=None, help="listen beyond loopback without a token")
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error")
    return parser


def main(arguments: list[str] | None = None) -> int:
    flags = vars(_parser().parse_args(arguments))
    try:
        logging.configure(level=flags.pop("log_level"))
        run_relay(read_settings(flags), lambda endpoint: print(f"relay {endpoint.url}", flush=True))  # noqa: T201
    except (KeepstepError, ValueError) as error:
        print(f"keepstep relay: {error}", file=sys.stderr)  # noqa: T201 - the last word of a command
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
