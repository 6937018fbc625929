"""Hosts of their own on one machine: network namespaces joined by a router, which can part any two of them.

Every host has an address of its own and reaches all others through the router, as does this process. A cut makes the
router swallow what two hosts send each other, without a word to either, like a network that drops. Needs root and
iproute2; ``why_not`` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

FOLDER = Path("/run/netns")
BLOCKS = 512
"""Subnets of 254 addresses in 198.18.0.0/15, which is reserved for network tests."""
GONE_SECONDS = 60.0

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Host:
    """A host. ``namespace``: its file, empty for the machine itself."""

    address: str = "127.0.0.1"
    namespace: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """Prefix of a command that runs on this host."""
        return ("ip", "netns", "exec", Path(self.namespace).name) if self.namespace else ()


LOOPBACK = Host()


class NamespaceError(RuntimeError):
    """``ip`` or ``tc`` failed."""


def _run(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


class Namespaces:
    """A context manager. Its end kills all processes on the hosts and removes the hosts."""

    def __init__(self) -> None:
        self._prefix = f"keepstep-{os.getpid()}-{next(_numbers)}-"
        self._router = f"{self._prefix}router"
        self._link = f"ks{os.getpid()}n{self._prefix.split('-')[2]}"
        self._block = ""
        self._hosts: dict[str, Host] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._filters: list[tuple[str, ...]] = []

    def __enter__(self) -> Self:
        _sweep()
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        self._block = _free_block()
        _ip("netns", "add", self._router)
        _ip("netns", "exec", self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "to0", "netns", self._router)
        _ip("address", "add", f"{self._block}.2/30", "dev", self._link)
        _ip("link", "set", self._link, "up")
        _ip("-n", self._router, "address", "add", f"{self._block}.1/30", "dev", "to0")
        _ip("-n", self._router, "link", "set", "to0", "up")
        _ip("route", "add", f"{self._block}.0/24", "via", f"{self._block}.1")

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(NamespaceError):  # it never came to be
            _ip("link", "delete", self._link)
        for namespace in _existing(self._prefix):
            _remove(namespace)

    def host(self, name: str) -> Host:
        """Return the host of this name; the first call creates it."""
        if name not in self._hosts:
            number = len(self._hosts) + 1
            router, address = f"{self._block}.{4 * number + 1}", f"{self._block}.{4 * number + 2}"
            namespace, link = f"{self._prefix}{name}", f"to{number}"
            _ip("netns", "add", namespace)
            _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", link, "netns", self._router)
            _ip("-n", self._router, "address", "add", f"{router}/30", "dev", link)
            _ip("-n", self._router, "link", "set", link, "up")
            _ip("-n", namespace, "address", "add", f"{address}/30", "dev", "eth0")
            for one in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", one, "up")
            _ip("-n", namespace, "route", "add", "default", "via", router)
            self._hosts[name] = Host(address, str(FOLDER / namespace))
        return self._hosts[name]

    def limit(self, name: str, rate: str) -> None:
        """Limit what the host sends and receives to ``rate``, such as ``1gbit``. It needs tc, of iproute2."""
        number = [*self._hosts].index(name) + 1
        for namespace, link in ((Path(self.host(name).namespace).name, "eth0"), (self._router, f"to{number}")):
            queue = ("root", "tbf", "rate", rate, "burst", "512kb", "latency", "10ms")
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", link, *queue)

    def cut(self, one: str, other: str) -> None:
        """Drop all packets between these two hosts, until ``mend``."""
        for source, target in ((one, other), (other, one)):
            self.drop(source, target)

    def drop(self, source: str, target: str) -> None:
        """Drop all packets from one host to the other, until ``mend``."""
        if (source, target) not in self._cuts:
            self._rule("add", source, target)
            self._cuts.add((source, target))

    @property
    def own_address(self) -> str:
        """Address of this machine, as the hosts reach it."""
        return f"{self._block}.2"

    def filter(self, name: str, port: int, verdict: str) -> None:
        """Let no packet through to a TCP port of a host, until ``mend``.

        Args:
            name: of the host.
            port: of it.
            verdict: ``blackhole``: drop the packets. ``unreachable`` or ``prohibit``: tell the sender so.
        """
        self._filters.append(("to", self.host(name).address, "ipproto", "tcp", "dport", str(port), verdict))
        _ip("-n", self._router, "rule", "add", *self._filters[-1])

    def unplug(self, name: str) -> None:
        """Let the host vanish, like a machine that loses power: it answers nothing any more."""
        _ip("-n", Path(self.host(name).namespace).name, "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Let all hosts reach each other again, except for those that were unplugged."""
        while self._cuts:
            self._rule("del", *self._cuts.pop())
        while self._filters:
            _ip("-n", self._router, "rule", "del", *self._filters.pop())

    def _rule(self, change: str, source: str, target: str) -> None:
        ends = "from", self.host(source).address, "to", self.host(target).address
        _ip("-n", self._router, "rule", change, *ends, "blackhole")


@cache
def why_not() -> str | None:
    """Return why network namespaces are not available here, or None if they are."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip, of iproute2"
    try:
        with Namespaces() as network:
            network.host("a"), network.host("b")
            network.cut("a", "b")
    except (NamespaceError, OSError) as error:
        return f"no network namespaces can be made here: {error}"
    return None


def _existing(prefix: str) -> list[str]:
    return sorted(one.name for one in FOLDER.glob(f"{prefix}*")) if FOLDER.exists() else []


def _free_block() -> str:
    used = _ip("-4", "address", "show") + _ip("-4", "route", "show", "table", "all")
    for number in range(BLOCKS):
        place = (os.getpid() + number) % BLOCKS
        block = f"198.{18 + place // 256}.{place % 256}"
        if f"{block}." not in used:
            return block
    raise NamespaceError("all of 198.18.0.0/15 is in use")


def _pids(namespace: str) -> list[int]:
    return [int(one) for one in _ip("netns", "pids", namespace).split()]


def _remove(namespace: str) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise NamespaceError(f"{namespace}: processes {pids} do not end")
        time.sleep(0.01)  # the kernel tells only their parents
    _ip("netns", "delete", namespace)


def _sweep() -> None:
    """Remove the namespaces of processes that were killed."""
    for namespace in _existing("keepstep-"):
        owner = re.match(r"keepstep-(\d+)-", namespace)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            with contextlib.suppress(NamespaceError):  # another process sweeps too
                _remove(namespace)
