"""Lose, delay, or slow down the packets of one process.

The process must be in a network namespace of its own, as a container is. The packets that it sends go to a queue that
drops, delays, or paces them; packets that arrive meet a routing rule that drops them. Needs root, ``nsenter`` and
iproute2. Loss and delay need the queue ``netem``, a module that some kernels do not have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache

from keepstep_chaos.observing import process_table

NEEDED = ("nsenter", "unshare", "ip", "tc")
COMMAND_SECONDS = 10.0
BLACKHOLE = ("blackhole",)
QUEUES: Mapping[str, tuple[str, ...]] = {
    "loss": ("netem", "loss", "20%"),
    "delay": ("netem", "delay", "100ms", "20ms"),
    "throttle": ("tbf", "rate", "1mbit", "burst", "32kbit", "latency", "1s"),
}
"""Kind of fault -> words of ``tc qdisc``."""


class NetworkError(Exception):
    """A command of iproute2 failed."""


def why_not(pid: int) -> str | None:
    """Return why the network of ``pid`` cannot be cut; None: it can."""
    if os.geteuid() != 0:
        return "cutting the network needs root"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"cutting the network needs {', '.join(missing)}"
    try:
        own = process_table.namespace("self") != process_table.namespace(pid)
    except OSError:
        return f"process {pid} has ended"
    return None if own else "its process shares the network of this machine; run it in a network namespace of its own"


def why_no_queue(kind: str) -> str | None:
    """Return why this kernel cannot queue packets for a kind of ``QUEUES``; None: it can. For root."""
    queue = QUEUES[kind][0]
    return None if _has(queue) else f"this kernel has no queue {queue}; load its module: modprobe sch_{queue}"


@cache
def _has(queue: str) -> bool:
    """Try a queue in a network namespace of its own."""
    words = next(words for words in QUEUES.values() if words[0] == queue)
    command = ("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *words)
    done = subprocess.run(  # noqa: S603 - the words are ours
        command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=COMMAND_SECONDS
    )
    return done.returncode == 0


class Cut:
    """A disturbed network: a context manager. It holds the namespace, so it can be undone after the process has ended.

    Args:
        pid: of a process in the namespace.
        sent: words of ``tc qdisc`` for packets that it sends; empty: they are left alone.
        received: whether packets that arrive are dropped.
    """

    def __init__(self, pid: int, sent: Sequence[str], *, received: bool) -> None:
        self._file = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        self._sent, self._received = sent, received
        self._undo: list[tuple[str, ...]] = []

    def __enter__(self) -> None:
        try:
            devices = self._devices()
            for device in devices if self._sent else ():
                self._run("tc", "qdisc", "replace", "dev", device, "root", *self._sent)
                self._undo.append(("tc", "qdisc", "del", "dev", device, "root"))
            if self._received:
                self._drop_received(devices)
        except BaseException:
            self.__exit__()
            raise

    def _drop_received(self, devices: Sequence[str]) -> None:
        """Add rules before that of local addresses, which is the first one and has to move for them."""
        self._run("ip", "rule", "add", "pref", "1", "lookup", "local")
        self._undo.append(("ip", "rule", "del", "pref", "1"))
        self._run("ip", "rule", "del", "pref", "0", "lookup", "local")
        self._undo.append(("ip", "rule", "add", "pref", "0", "lookup", "local"))
        for device in devices:
            self._run("ip", "rule", "add", "pref", "0", "iif", device, "blackhole")
            self._undo.append(("ip", "rule", "del", "pref", "0", "iif", device, "blackhole"))

    def __exit__(self, *_: object) -> None:
        failed: NetworkError | None = None
        while self._undo:
            try:
                self._run(*self._undo.pop())
            except NetworkError as error:  # the other rules must go too
                failed = error
        os.close(self._file)
        if failed is not None:
            raise failed

    def _devices(self) -> list[str]:
        lines = self._run("ip", "-o", "link", "show", "up").splitlines()
        names = [line.split()[1].rstrip(":").partition("@")[0] for line in lines]
        return [name for name in names if name != "lo"]

    def _run(self, *command: str) -> str:
        inside: Sequence[str] = ("nsenter", f"--net=/proc/{os.getpid()}/fd/{self._file}", *command)
        done = subprocess.run(  # noqa: S603 - the words are ours
            inside, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS
        )
        if done.returncode:
            raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout
