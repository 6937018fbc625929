"""Inject one fault, and undo it, also if the command ends in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click import ClickException

from keepstep_chaos.injecting import exhausting, inside, network
from keepstep_chaos.injecting.elsewhere import Templates, command
from keepstep_chaos.injecting.remote_command import CommandError, run_command
from keepstep_chaos.observing import process_table
from keepstep_chaos.observing.targets import Place, Places, process_at
from keepstep_chaos.vocabulary import KINDS, Fault, Role, Target
from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.running.run_control import order_restart

SLOW_STOPPED_SECONDS, SLOW_RUNNING_SECONDS = 0.08, 0.02
"""A slow process runs a fifth of the time."""
ACT_END_SECONDS = 60.0
"""Maximum time from a polite request to the end of a process."""
REASON = "keepstep chaos"


class InjectionError(Exception):
    """The fault could not be injected."""


@dataclass(frozen=True, slots=True)
class Permissions:
    restart_services: bool = False
    """Start services again that no `keepstep run` supervises."""
    fill_shared_disks: bool = False


def unavailable(place: Place, permissions: Permissions) -> dict[str, str]:
    """Return the kinds that cannot hit this target, each with the reason. Kinds of other roles are left out."""
    reasons: dict[str, str] = {}
    supervised = place.local or place.elsewhere
    for name in (name for name, kind in KINDS.items() if place.target.role in kind.roles):
        reason = None
        if name in ("kill", "restart") and place.url and not supervised:
            reason = _no_restart(place, permissions)
        elif name == "memory" and place.url and not supervised:
            reason = _no_restart(place, permissions)  # a process that gets no memory may end
        elif name.startswith("cut") or name in network.QUEUES:
            reason = network.why_not(place.pids[0]) if place.pids else "it does not run"
            reason = reason or (network.why_no_queue(name) if name in network.QUEUES else None)
        elif KINDS[name].inside:
            reason = inside.why_not(place.pids)
        elif name == "fill-disk":
            reason = exhausting.why_not(place.data_folder, shared=permissions.fill_shared_disks)
        if reason is not None:
            reasons[name] = reason
    return reasons


def available(place: Place, permissions: Permissions) -> list[str]:
    """Return the kinds that can hit this target."""
    not_these = unavailable(place, permissions)
    return [name for name, kind in KINDS.items() if place.target.role in kind.roles and name not in not_these]


def _no_restart(place: Place, permissions: Permissions) -> str | None:
    if not permissions.restart_services:
        return "no `keepstep run` starts it again; pass --restart-services to let this command start it again"
    if place.program is None:
        return "its command line cannot be read"
    if any(word.endswith(":0") for word in place.program.argv):
        return "it listens on any free port, so a restart would give it another one; start it with a fixed port"
    return None


@dataclass
class _Starved:
    pids: list[int]
    start: Callable[[], None]
    trouble: str = ""
    """Why it could not be started."""


class Injector:
    """Injects faults.

    Args:
        places: where the targets are.
        lighthouse: for orders.
        folder: for the output of services that it starts.
        templates: of commands for targets elsewhere; None: it hits the processes of this machine.
    """

    def __init__(
        self, places: Places, lighthouse: Lighthouse, folder: Path, templates: Templates | None = None
    ) -> None:
        self._places = places
        self._lighthouse = lighthouse
        self._folder = folder
        self._templates = templates
        self._started: list[subprocess.Popen[bytes]] = []
        """Services that it started, which are its children."""
        self._starved: dict[Target, _Starved] = {}
        """Services whose process had no memory: it may end long after the fault."""
        self._namespaces: dict[Target, int] = {}
        """Open network namespaces of services that it starts, until ``close``."""

    def close(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.popitem()[1])

    async def inject(self, fault: Fault) -> None:
        """Inject ``fault``, and return when it is over. Raises InjectionError, before or after it hit."""
        self._started = [one for one in self._started if one.poll() is None]
        self._places.refresh()
        place = self._places.by_target[fault.target]
        words = self._templates.of(fault.target, fault.kind.name) if self._templates is not None else None
        if not place.pids and not place.elsewhere and fault.target.role != Role.JOB:
            raise InjectionError("it does not run")
        try:
            if words is not None:
                await run_command(command(words, fault, self._places.job, place.url), fault)
                return
            await self._acts[fault.kind.name](self, place, fault)
        except ClickException as error:
            raise InjectionError(error.message.splitlines()[0]) from error
        except (inside.OrderError, CommandError) as error:
            raise InjectionError(str(error)) from error
        except (OSError, network.NetworkError, TimeoutError) as error:
            raise InjectionError(f"{type(error).__name__}: {error}") from error

    # ---- processes

    async def _kill(self, place: Place, _fault: Fault) -> None:
        start_again = self._start_again(place)
        _signal(place.pids, signal.SIGKILL)
        await _ended(place.pids)
        start_again()

    async def _restart(self, place: Place, _fault: Fault) -> None:
        if place.target.role == Role.GROUP:
            order_restart(place.run, [place.local])
            await _ended(place.pids)
            return
        start_again = self._start_again(place)
        _signal(place.pids, signal.SIGTERM)
        try:
            await _ended(place.pids)
        except TimeoutError as error:
            _signal(place.pids, signal.SIGKILL)
            await _ended(place.pids)
            start_again()
            raise InjectionError(f"SIGTERM did not end it within {ACT_END_SECONDS:g} s; it was killed") from error
        start_again()

    def _start_again(self, place: Place) -> Callable[[], None]:
        """Return a function that starts a service again which no other process starts, in its network namespace."""
        if not _started_here(place):
            return lambda: None
        assert place.program is not None
        program, inside = place.program, self._inside(place)

        def start() -> None:
            name = f"{place.target.role}-{place.target.name}".replace(":", "-")
            with (self._folder / f"{name}.log").open("ab") as log:
                started = subprocess.Popen(  # noqa: S603 - the command that the service had
                    [*inside, *program.argv],
                    env=program.environment,
                    cwd=program.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._started.append(started)
            self._starved.pop(place.target, None)
            place.pids = [started.pid]

        return start

    def _inside(self, place: Place) -> list[str]:
        """Return the prefix of a command that runs in the network namespace of ``place``, which is held open."""
        if process_table.namespace(place.pids[0]) == process_table.namespace("self"):
            return []
        if place.target not in self._namespaces:
            self._namespaces[place.target] = os.open(f"/proc/{place.pids[0]}/ns/net", os.O_RDONLY)
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespaces[place.target]}"]

    async def _freeze(self, place: Place, fault: Fault) -> None:
        with _stopped(place.pids):
            await asyncio.sleep(fault.seconds)

    async def _slow(self, place: Place, fault: Fault) -> None:
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until:
            with _stopped(place.pids):
                await asyncio.sleep(SLOW_STOPPED_SECONDS)
            await asyncio.sleep(SLOW_RUNNING_SECONDS)

    async def _memory(self, place: Place, fault: Fault) -> None:
        if _started_here(place):
            self._starved[place.target] = _Starved(place.pids, self._start_again(place))
        with exhausting.memory_limited(place.pids):
            await asyncio.sleep(fault.seconds)
        self._start_if_ended(place.target)

    def start_ended(self, acting: Collection[Target] = ()) -> list[str]:
        """Start services again that ended because they had no memory. Return a line for each.

        Args:
            acting: targets of faults that act now; these are left alone.
        """
        lines = []
        for target in self._starved.keys() - set(acting):
            one, ended = self._starved[target], f"{target} ended some time after it had no memory"
            try:
                if self._start_if_ended(target):
                    lines.append(f"{ended}, and was started again")
            except OSError as error:
                if one.trouble != str(error):
                    one.trouble = str(error)
                    lines.append(f"{ended}, and cannot be started: {error}; trying again")
        return lines

    def _start_if_ended(self, target: Target) -> bool:
        one, pids = self._starved.get(target), self._places.by_target[target].pids
        if one is None:
            return False
        if any(map(process_table.alive, pids)):
            if pids != one.pids:
                del self._starved[target]  # another process took its place
            return False
        one.start()
        return True

    async def _order_inside(self, place: Place, fault: Fault) -> None:
        await inside.order(place.pids, fault.kind.name, fault.seconds)

    # ---- surroundings

    async def _cut(self, place: Place, fault: Fault) -> None:
        name = fault.kind.name
        sent = network.QUEUES.get(name, () if name == "cut-in" else network.BLACKHOLE)
        await _within(network.Cut(place.pids[0], sent, received=name in ("cut", "cut-in")), fault.seconds)

    async def _fill_disk(self, place: Place, fault: Fault) -> None:
        if place.data_folder is None:
            raise InjectionError("it has no data directory")
        disk = exhausting.FullDisk(place.data_folder)
        await _within(disk, fault.seconds, disk.stop)

    # ---- orders

    async def _evict(self, place: Place, _fault: Fault) -> None:
        await self._order("replicas", place.target.name, "evict", reason=REASON, ban_seconds=0.0)
        await _ended(place.pids)

    async def _drain(self, place: Place, _fault: Fault) -> None:
        try:
            await self._order("replicas", place.target.name, "drain", reason=REASON)
            await _ended(place.pids)
        finally:
            order_restart(place.run, [place.local])  # its exit code says that it is finished

    async def _policy(self, place: Place, fault: Fault) -> None:
        job = place.target.name
        before = (await self._lighthouse.get("jobs", job))["policy"]["join_timeout"]
        await self._lighthouse.patch("jobs", job, join_timeout=before + 1.0)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            await self._patched_back(job, before)

    async def _patched_back(self, job: str, before: float) -> None:
        """Restore the policy, also if no lighthouse answers for some time."""
        async with asyncio.timeout(ACT_END_SECONDS):
            while True:
                try:
                    await self._lighthouse.patch("jobs", job, join_timeout=before)
                    return
                except ClickException:
                    await asyncio.sleep(0.5)

    async def _verify(self, _place: Place, _fault: Fault) -> None:
        await self._order("verify")

    async def _order(self, *path: str, **body: Any) -> None:
        await self._lighthouse.post("jobs", self._places.job, *path, **body)

    _acts = {  # noqa: RUF012 - a table that does not change
        "kill": _kill,
        "restart": _restart,
        "freeze": _freeze,
        "slow": _slow,
        "memory": _memory,
        "cut": _cut,
        "cut-in": _cut,
        "cut-out": _cut,
        "loss": _cut,
        "delay": _cut,
        "throttle": _cut,
        "exception": _order_inside,
        "hang": _order_inside,
        "hang-loop": _order_inside,
        "nan": _order_inside,
        "gil": _order_inside,
        "clock": _order_inside,
        "fill-disk": _fill_disk,
        "evict": _evict,
        "drain": _drain,
        "policy": _policy,
        "verify": _verify,
    }


async def inject_at(address: str, kind: str, seconds: float, permissions: Permissions) -> None:
    """Bring a fault on the process of this user that listens at ``host:port``, which its platform starts again.

    Raises:
        InjectionError: the fault did not hit, or is not possible.
    """
    try:
        pid = process_at(address)
    except ValueError as error:
        raise InjectionError(str(error)) from error
    if pid == 1 and kind in ("kill", "freeze", "slow"):
        raise InjectionError(
            "process 1 of a container ignores signals from inside; start it with an init (docker run --init), or give "
            "`keepstep chaos` a command from outside, such as --exec 'kill=docker kill {host}'"
        )
    target = Target(Role.GROUP, address)  # the role that may have any kind of fault
    place = Place(target, [pid], url=f"http://{address}", elsewhere=True, program=process_table.program_of(pid))
    if (why := unavailable(place, permissions).get(kind)) is not None:
        raise InjectionError(why)
    places = Places("")
    places.add(place)
    fault = Fault(1, KINDS[kind], target, seconds if KINDS[kind].lasts else 0.0)
    await Injector(places, Lighthouse("http://127.0.0.1:1", None), Path()).inject(fault)


def _started_here(place: Place) -> bool:
    """Return whether this command starts it again: no other process does."""
    return not (place.local or place.elsewhere)


async def _within(
    context: AbstractContextManager[None], seconds: float, stop: Callable[[], None] | None = None
) -> None:
    """Enter ``context`` for so many seconds, in a thread, because it starts commands or writes files.

    ``stop``: lets a long entry end early, after a cancellation.
    """
    entering = asyncio.ensure_future(asyncio.to_thread(context.__enter__))
    try:
        await asyncio.shield(entering)
        await asyncio.sleep(seconds)
    finally:
        if stop is not None:
            stop()
        await asyncio.wait([entering])  # a thread goes on after a cancellation, and what it did must be undone
        if entering.exception() is None:
            context.__exit__(None, None, None)


@contextlib.contextmanager
def _stopped(pids: list[int]) -> Any:
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def _ended(pids: list[int]) -> None:
    """Wait until the processes have ended. Raises TimeoutError."""
    async with asyncio.timeout(ACT_END_SECONDS):
        while any(map(process_table.alive, pids)):  # noqa: ASYNC110 - the kernel tells only their parents
            await asyncio.sleep(0.02)
