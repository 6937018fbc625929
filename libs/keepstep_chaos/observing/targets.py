"""Find the processes of a job: groups of ``keepstep run`` on this machine, and services that listen here."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keepstep_chaos.observing import process_table
from keepstep_chaos.observing.process_table import Program
from keepstep_chaos.vocabulary import Role, Target
from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.errors import Unreachable
from keepstep_cli.running.run_control import order_restart, running_here


@dataclass(slots=True)
class Place:
    """A target, and what is known about its processes."""

    target: Target
    pids: list[int]
    local: str = ""
    """Name at its ``keepstep run``; empty: none supervises it."""
    run: str = ""
    """Socket of that ``keepstep run``."""
    url: str = ""
    """Of a service, and of a target elsewhere; empty: a group of this machine."""
    elsewhere: bool = False
    """It is reached by a command, and its platform starts it again; its processes are not known."""
    program: Program | None = None
    """How a service was started; None: not known, or a group."""

    @property
    def data_folder(self) -> Path | None:
        """Its ``--data-dir``."""
        return self.program.path("--data-dir") if self.program else None


@dataclass(slots=True)
class Places:
    """All targets of one job, with their processes as of the last ``refresh``."""

    job: str
    by_target: dict[Target, Place] = field(default_factory=dict)

    def add(self, place: Place) -> None:
        self.by_target.setdefault(place.target, place)

    @property
    def targets(self) -> list[Target]:
        return sorted(self.by_target)

    def alive(self, down: Collection[Target] = ()) -> set[Target]:
        """Return targets with a process; of those elsewhere, those that are not ``down``."""
        return {
            target
            for target, one in self.by_target.items()
            if (target not in down if one.elsewhere else any(map(process_table.alive, one.pids)))
        }

    def refresh(self) -> None:
        """Learn the processes of groups that were restarted, and of services whose process has ended."""
        runs = {run: _asked(run) for run in running_here(self.job)}
        for place in self.by_target.values():
            if place.elsewhere:
                continue
            if place.local:
                place.pids = runs.get(place.run, {}).get("processes", {}).get(place.local, place.pids)
            elif place.url and not any(map(process_table.alive, place.pids)):
                place.pids = _listening(place.url)


def group_of(places: Places, replica_id: str) -> Target | None:
    """Return the target of a group by its name or incarnation at the lighthouse."""
    from keepstep_mesh.protocol.names import name_of

    name = name_of(replica_id)
    for known in (Target(Role.GROUP, name), Target(Role.GROUP, f"r{name}")):
        if known in places.by_target:
            return known
    return None


async def find(lighthouse: Lighthouse, job: str, etcd: Sequence[str]) -> Places:
    """Find all targets. ``etcd``: addresses of etcd nodes, as ``http://host:port``.

    Raises:
        Unreachable: no ``keepstep run`` of the job on this machine, or no lighthouse answers.
    """
    places = Places(job)
    places.add(Place(Target(Role.JOB, job), []))
    runs = {run: _asked(run) for run in running_here(job)}
    if not runs:
        raise Unreachable(f"no `keepstep run` of job {job!r} by this user on this machine; give another --job")
    embedded: dict[int, tuple[str, str]] = {}
    """The run and the local name of each process of a run."""
    for run, answer in runs.items():
        embedded |= {pid: (run, name) for name, pids in answer.get("processes", {}).items() for pid in pids}
        for local in answer.get("groups", ()):
            known = answer.get("names", {}).get(local) or local
            pids = answer.get("processes", {}).get(local, [])
            places.add(Place(Target(Role.GROUP, known), pids, local=local, run=run))
    if not embedded:
        raise Unreachable(f"the `keepstep run` of job {job!r} does not tell its processes: it is of an older keepstep")
    taken: set[int] = set()
    for role, url in await _services(lighthouse, etcd):
        pids = [pid for pid in _listening(url) if pid not in taken]
        if pids:
            taken.update(pids)
            places.add(_service(Target(role, urlsplit(url).netloc), url, pids, embedded.get(pids[0])))
    return places


async def find_elsewhere(lighthouse: Lighthouse, job: str, etcd: Sequence[str]) -> Places:
    """Find all targets of a job that runs elsewhere, as the lighthouse knows them. Raises Unreachable, Refused."""
    places = Places(job)
    places.add(Place(Target(Role.JOB, job), []))
    for target, address in addresses_of(await lighthouse.get("jobs", job, "replicas")):
        places.add(Place(target, [], url=address, elsewhere=True))
    for role, url in await _services(lighthouse, etcd):
        places.add(Place(Target(role, urlsplit(url).netloc), [], url=url, elsewhere=True))
    return places


def addresses_of(replicas: Any) -> Iterator[tuple[Target, str]]:
    """Yield the groups that run and have an address, from an answer of the lighthouse."""
    from keepstep_mesh.protocol.names import name_of

    for one in replicas["replicas"]:
        if one["address"] and one["state"] != "gone":
            yield Target(Role.GROUP, name_of(one["replica_id"])), one["address"]


async def _services(lighthouse: Lighthouse, etcd: Sequence[str]) -> list[tuple[Role, str]]:
    cluster = await lighthouse.get("cluster")
    urls = [(Role.LIGHTHOUSE, one["address"]) for one in cluster["nodes"]]
    urls += [(Role(one["kind"]), one["address"]) for one in cluster["services"] if one["kind"] in ("relay", "metrics")]
    return urls + [(Role.STORE, one) for one in etcd]


def process_at(address: str) -> int:
    """Return the process of this user that listens at ``host:port`` of this machine.

    Raises:
        ValueError: the address is not one of this machine, or no such process listens there.
    """
    parts = urlsplit(f"//{address}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if port is None:
        raise ValueError(f"invalid address {address!r}: expected host:port")
    host = parts.hostname or ""
    for ip in _own_addresses(host):
        if (found := process_table.listener(ip, port)) is not None:
            return found
    raise ValueError(f"no process of this user listens at {address}")


def _own_addresses(host: str) -> list[str]:
    """Return the addresses of ``host``, which is this machine. Raises ValueError."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)] if host else []
    except OSError as error:
        raise ValueError(f"unknown host {host!r}: {error}") from error
    for ip in found:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as one, contextlib.suppress(OSError):
            one.bind((ip, 0))
            return [host, *found]
    if host:
        raise ValueError(f"{host} is not an address of this machine")
    return [""]


def _service(target: Target, url: str, pids: list[int], embedded: tuple[str, str] | None) -> Place:
    place = Place(target, pids, url=url)
    with contextlib.suppress(OSError):
        place.program = process_table.program_of(pids[0])
    if embedded is not None:
        place.run, place.local = embedded
    return place


def _listening(url: str) -> list[int]:
    parts = urlsplit(url)
    found = process_table.listener(parts.hostname or "", parts.port or 0)
    return [] if found is None else [found]


def _asked(run: str) -> dict[str, Any]:
    """Return the answer of a ``keepstep run``; empty: it does not answer."""
    try:
        return order_restart(run, ())
    except OSError:
        return {}
