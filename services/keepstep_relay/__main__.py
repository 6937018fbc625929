"""``python -m keepstep_relay``: the relay as a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from keepstep_mesh.config.settings import byte_size, duration
from keepstep_mesh.serving import program
from keepstep_mesh.serving.process import Hosted
from keepstep_mesh.serving.service import Endpoint
from keepstep_relay.app import Relay
from keepstep_relay.settings import LIMITS, RelaySettings, read_settings
from keepstep_relay.tiers.allocator import keep_freed_memory


def hosted_relay(settings: RelaySettings, started: Callable[[Endpoint], None]) -> Hosted:
    """For ``process.run_services``. ``started`` is told where it listens."""
    keep_freed_memory()
    return Hosted(lambda: Relay(settings).service(), settings, started)


def _parser() -> argparse.ArgumentParser:
    parser = program.parser_of("keepstep_relay", "Passes checkpoints on, and keeps them.", RelaySettings.bind)
    parser.add_argument("--memory", type=byte_size, help="size of the memory tier, such as 8GiB (4GiB)")
    parser.add_argument("--data-dir", type=Path, help="folder of the disk tier (none: nothing survives a restart)")
    parser.add_argument("--durable", help="URL of fsspec to which durable checkpoints are copied")
    parser.add_argument("--lighthouse", help="http://host:port[,...] of the lighthouses to register with")
    parser.add_argument("--name", help="under which it registers (host and port)")
    parser.add_argument("--max-wait", type=duration, help="longest that a reader waits for what is to come (60)")
    parser.add_argument("--body-timeout", type=duration, help="longest that a chunk may take in or out (60)")
    for name, (_, read) in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=read, help="see docs/relay.md")
    return parser


def main(arguments: list[str] | None = None) -> int:
    return program.main(
        "relay", _parser(), lambda flags, started: hosted_relay(read_settings(flags), started), arguments
    )


if __name__ == "__main__":
    sys.exit(main())
