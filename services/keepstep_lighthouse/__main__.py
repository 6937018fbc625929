"""``python -m keepstep_lighthouse``: the lighthouse as a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.quorum.events import Policy
from keepstep_lighthouse.settings import LighthouseSettings, read_like, read_settings
from keepstep_mesh.config.settings import duration
from keepstep_mesh.serving import program
from keepstep_mesh.serving.process import Hosted
from keepstep_mesh.serving.service import Endpoint


def hosted_lighthouse(settings: LighthouseSettings, started: Callable[[Endpoint], None]) -> Hosted:
    """For ``process.run_services``. ``started`` is told where it listens."""
    return Hosted(lambda: Lighthouse(settings).service(), settings, started)


def _parser() -> argparse.ArgumentParser:
    parser = program.parser_of("keepstep_lighthouse", "Forms the quorums of training jobs.", LighthouseSettings.bind)
    parser.add_argument("--store", help="memory://, sqlite:///path or etcd://host:port/prefix (memory://)")
    parser.add_argument("--lease", type=duration, help="with etcd: a leader not heard of for so long is succeeded (10)")
    parser.add_argument("--max-jobs", type=int, help="jobs held at most (1000)")
    parser.add_argument("--event-log", type=Path, help="file that gets every event as a line of JSON")
    for one in fields(Policy):
        flag = f"--{one.name.replace('_', '-')}"
        parser.add_argument(flag, type=read_like(one.default), help=f"policy of new jobs ({one.default})")
    return parser


def main(arguments: list[str] | None = None) -> int:
    return program.main(
        "lighthouse", _parser(), lambda flags, started: hosted_lighthouse(read_settings(flags), started), arguments
    )


if __name__ == "__main__":
    sys.exit(main())
