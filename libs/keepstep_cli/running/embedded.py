"""Run the job's own lighthouse and relay under its supervisor, on loopback. The lighthouse survives a SIGKILL."""

from __future__ import annotations

import http.client
import importlib.util
import json
import socket
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from keepstep_cli.asking.defaults import DEFAULT_PORT
from keepstep_cli.errors import Missing
from keepstep_cli.running.launcher import Program
from keepstep_cli.running.ranks import free_port
from keepstep_cli.running.supervisor_events import GroupSpec

NAME = "lighthouse"
MAX_HEALTH_BYTES = 4096
_claims: list[socket.socket] = []
"""Sockets that are held until this process ends."""
TLS_VARIABLES = ("KEEPSTEP_LIGHTHOUSE_TLS_", "TORCHFT_LIGHTHOUSE_TLS_")


def place(usual: int = DEFAULT_PORT) -> tuple[int, str | None]:
    """Return ``usual`` if it is free, so that ``keepstep status`` needs no flag; else any free port, and the address of
    the lighthouse that listens on ``usual``, if one does.
    """
    try:
        free_port(usual)
        _claim(usual)
    except OSError:
        address = f"http://127.0.0.1:{usual}"
        return free_port(), address if _is_lighthouse(address) else None
    return usual, None


def _claim(port: int) -> None:
    """Claim ``port``. Raises OSError if another live process has claimed it.

    A lighthouse takes a second to listen. Without the claim, two runs that begin together would both find the port
    free, and the groups of one run would connect to the lighthouse of the other.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0keepstep lighthouse on port {port}")
    except BaseException:
        claim.close()
        raise
    _claims.append(claim)


def _is_lighthouse(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/healthz", timeout=1.0) as answer:  # noqa: S310 - http, on loopback
            return bool(json.loads(answer.read(MAX_HEALTH_BYTES))["service"] == NAME)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return False


def lighthouse_program(
    port: int, state_dir: Path, environment: Mapping[str, str], flags: tuple[str, ...] = ()
) -> Program:
    """Return a lighthouse with its state in ``state_dir``. ``flags``: more flags of ``keepstep lighthouse``."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise Missing("a lighthouse needs prometheus_client: pip install 'keepstep[services]', or give --lighthouse")
    settings = {
        "--bind": f"127.0.0.1:{port}",
        "--store": f"sqlite://{state_dir / 'lighthouse.sqlite'}",
        "--event-log": str(state_dir / "events.jsonl"),
    }
    # It listens on loopback, and ranks get an http address.
    own = {name: value for name, value in environment.items() if not name.startswith(TLS_VARIABLES)}
    return _service(NAME, settings, own, flags)


def relay_program(lighthouse: str, environment: Mapping[str, str], data_dir: Path | None = None) -> Program:
    """Return a relay; ranks learn its address from ``lighthouse``. ``data_dir``: its disk; None: without one."""
    disk = {} if data_dir is None else {"--data-dir": str(data_dir)}
    return _service("relay", {"--bind": "127.0.0.1:0", "--lighthouse": lighthouse, **disk}, environment)


def _service(
    name: str, settings: Mapping[str, str], environment: Mapping[str, str], flags: tuple[str, ...] = ()
) -> Program:
    quiet = {"--log-format": "console", "--log-level": "error"}
    words = [word for setting in {**settings, **quiet}.items() for word in setting]
    command = (sys.executable, "-m", "keepstep_cli", name, *words, *flags)
    return Program(GroupSpec(name, service=True), command, lambda _restart: [dict(environment)])
