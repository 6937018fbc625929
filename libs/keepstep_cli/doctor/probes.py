"""Measure what ``keepstep doctor`` reports: services, clocks, packets, ports, groups, and this machine."""

from __future__ import annotations

import asyncio
import platform
import resource
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from click import ClickException

from keepstep_cli.asking.defaults import DEFAULT_PORT
from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.doctor import findings
from keepstep_cli.doctor.findings import Probe
from keepstep_mesh.checks.findings import Finding, Verdict
from keepstep_mesh.checks.gpu_counters import examine_gpus

if TYPE_CHECKING:
    import aiohttp

    from keepstep_mesh.security.tls import TlsFiles

PROBE_SECONDS = 5.0
IP_MTU = 14
"""Of ``getsockopt``; Python does not export it."""
USUAL_PORTS = {"lighthouse": DEFAULT_PORT, "relay": DEFAULT_PORT + 10, "metrics": DEFAULT_PORT + 20}


async def examine(lighthouse: Lighthouse, job: str, tls: TlsFiles) -> list[Finding]:
    """Return the findings of all checks. An unreachable lighthouse is a finding too."""
    from keepstep_mesh.net.addresses import outward_address
    from keepstep_mesh.net.http import Identity

    found: list[Finding] = []
    replicas: list[dict[str, Any]] = []
    services: list[tuple[str, str]] = []
    try:
        cluster = await lighthouse.get("cluster")
        services = [("lighthouse", one["address"]) for one in cluster["nodes"]]
        services += [(one["kind"], one["address"]) for one in cluster["services"]]
        found += _of_cluster(cluster)
        replicas = await _replicas(lighthouse, job)
    except ClickException as error:
        *reasons, advice = error.message.splitlines()
        found.append(Finding("lighthouse", Verdict.FAIL, " ".join(map(str.strip, reasons)) or advice, advice))
    async with Identity(None, tls).session(timeout=PROBE_SECONDS) as http:
        probes = await asyncio.gather(*(_probe(http, kind, address, tls) for kind, address in services))
        ports = [await _port(http, kind, port) for kind, port in USUAL_PORTS.items()]
    for probe in probes:
        found += findings.of_service(probe)
    found += findings.of_mtus({probe.address: probe.mtu for probe in probes if probe.mtu is not None})
    found += findings.of_groups(replicas, await _unreachable(one["address"] for one in replicas))
    found += findings.of_copies(replicas)
    found += findings.of_versions(replicas, _runtime_here())
    found += ports
    found += await asyncio.to_thread(examine_gpus)
    return found + findings.of_machine(resource.getrlimit(resource.RLIMIT_NOFILE)[1], outward_address())


def _of_cluster(cluster: Mapping[str, Any]) -> list[Finding]:
    store = cluster["store"]
    troubles = {f"store {store['kind']}": store["trouble"]}
    troubles |= {f"lighthouse {one['address']}": one["trouble"] for one in cluster["nodes"] if one["trouble"]}
    return [
        Finding(name, Verdict.FAIL if trouble else Verdict.OK, trouble or "works", "fix the reason" if trouble else "")
        for name, trouble in troubles.items()
    ]


async def _replicas(lighthouse: Lighthouse, job: str) -> list[dict[str, Any]]:
    known = [one["job"] for one in (await lighthouse.get("jobs"))["jobs"]]
    if job not in known:
        return []
    replicas: list[dict[str, Any]] = (await lighthouse.get("jobs", job, "replicas"))["replicas"]
    return replicas


async def _probe(http: aiohttp.ClientSession, kind: str, address: str, tls: TlsFiles) -> Probe:
    import aiohttp

    from keepstep_mesh.checks.service_answers import PADDING, fastest_answer, healthz
    from keepstep_mesh.security.request_errors import explained

    probe = Probe(kind, address, mtu=_mtu(address))
    try:
        best = await fastest_answer(http, address)
        probe = replace(probe, round_trip=best.round_trip, clock_offset=best.clock_offset, answers_as=best.service)
        probe = replace(probe, not_ready=await _not_ready(http, address))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return replace(probe, problem=explained(error, address))
    probe = replace(probe, certificate_days=await _certificate_days(address, tls))
    try:
        await healthz(http, address, PADDING)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return replace(probe, large_problem=explained(error, address))
    return probe


async def _not_ready(http: aiohttp.ClientSession, address: str) -> str:
    """Return why a service cannot do its work; empty: it can. Needs no token."""
    async with http.get(f"{address}/readyz", allow_redirects=False) as answer:
        if answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
            return ""
        body = await answer.json(content_type=None)
        return str(body.get("detail", "")) or "not ready"


async def _certificate_days(address: str, tls: TlsFiles) -> float | None:
    """Return the days until the certificate of a service ends. None: no TLS, or no answer."""
    parts = urlsplit(address)
    if parts.scheme != "https":
        return None
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls.client_context())
    except (TimeoutError, OSError):
        return None
    shown = writer.get_extra_info("peercert")
    writer.transport.abort()
    return (ssl.cert_time_to_seconds(shown["notAfter"]) - time.time()) / 86400


def _mtu(address: str) -> int | None:
    """Return the MTU of the route to ``address``, as far as the kernel knows it. Sends nothing."""
    parts = urlsplit(address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname or "", parts.port or 80))
            return probe.getsockopt(socket.IPPROTO_IP, IP_MTU)
    except OSError:
        return None


async def _port(http: aiohttp.ClientSession, kind: str, port: int) -> Finding:
    import aiohttp

    from keepstep_mesh.checks.service_answers import healthz

    try:
        with socket.create_server(("127.0.0.1", port)):
            return findings.of_port(port, kind, "", in_use=False)
    except OSError:
        pass
    try:
        answer = await healthz(http, f"http://127.0.0.1:{port}")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        answer = {}
    return findings.of_port(port, kind, str(answer.get("service", "")), in_use=True)


async def _unreachable(addresses: Iterable[str]) -> dict[str, str]:
    """Return why a connection to a group server fails, for each address where it does."""
    wanted = sorted({one for one in addresses if one})
    reasons = await asyncio.gather(*map(_connect, wanted))
    return {address: reason for address, reason in zip(wanted, reasons, strict=True) if reason}


async def _connect(address: str) -> str:
    parts = urlsplit(address)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.close()
    except TimeoutError:
        return f"no answer within {PROBE_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _runtime_here() -> str:
    """Return the versions as groups report theirs, without importing torch."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"python {platform.python_version()}, torch {torch}"
