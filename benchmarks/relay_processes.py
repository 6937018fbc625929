"""Measure the bytes per second of a relay with one and with two processes.

Clients of a relay are on other machines. With at least four cores the relays run on the first two and the clients on
the rest, and the figure is bytes per second. With fewer cores the clients would take time from the relay. The figure
then is bytes per second of processor time, times the number of processes: the rate if each process had a core of its
own, and the clients kept all of them busy. Chunks travel over loopback, and both sides verify them.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import urllib.request
from pathlib import Path

from figures import Figure, Limit, p50
from relay import delete, processor_seconds, running_relay, upload

STREAMS = 4
MEBIBYTES = 1024
TURNS = 3
RELAY_CORES = 2
START_SECONDS = 60.0
FASTER = 1.6
"""Goal: two processes are this many times as fast as one."""

Seen = tuple[float, float]
"""Seconds of a transfer, and processor seconds of all processes of the relay, divided by their number."""


class Relay:
    """A running relay. ``cores``: those on which it runs; empty: all."""

    def __init__(self, processes: int, cores: set[int], stack: contextlib.ExitStack) -> None:
        main, self._port = stack.enter_context(running_relay("--memory", "4GiB", "--processes", str(processes)))
        deadline = time.monotonic() + START_SECONDS
        while self._serving() < processes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the relay did not start {processes} processes within {START_SECONDS:g} s")
            time.sleep(0.1)  # processes of another process: only its metrics show them
        self._processes = [main, *main.children()]
        for thread in [thread for one in self._processes for thread in one.threads()]:
            if cores:
                os.sched_setaffinity(thread.id, cores)

    def _serving(self) -> int:
        with urllib.request.urlopen(f"http://localhost:{self._port}/metrics") as answer:
            found = re.search(r"^keepstep_relay_processes (\d+)", answer.read().decode(), re.MULTILINE)
        return int(found[1]) if found else 0

    def turn(self, pack: memoryview, name: str) -> dict[str, Seen]:
        """Upload and download a state."""
        began = self._spent()
        seconds, read = upload(self._port, pack, STREAMS, name)
        uploaded = self._spent()
        read_seconds = read()
        downloaded = self._spent()
        delete(self._port, name)
        return {"upload": (seconds, uploaded - began), "download": (read_seconds, downloaded - uploaded)}

    def _spent(self) -> float:
        return sum(map(processor_seconds, self._processes)) / len(self._processes)


def measure(*, quick: bool, apart: bool) -> dict[tuple[str, int], list[Seen]]:
    """Return what each direction and number of processes took. The relays take turns."""
    cores = sorted(os.sched_getaffinity(0))
    found: dict[tuple[str, int], list[Seen]] = {}
    with contextlib.ExitStack() as stack:
        relays = {count: Relay(count, set(cores[:RELAY_CORES]) if apart else set(), stack) for count in (1, 2)}
        if apart:
            stack.callback(os.sched_setaffinity, 0, cores)
            os.sched_setaffinity(0, cores[RELAY_CORES:])
        pack = memoryview(bytearray(os.urandom((MEBIBYTES // 2 if quick else MEBIBYTES) << 20)))
        for turn in range((1 if quick else TURNS) + 1):
            for count, relay in relays.items():
                for way, seen in relay.turn(pack, f"turn-{turn}").items():
                    if turn:  # the first one gets its memory from the kernel
                        found.setdefault((way, count), []).append(tuple(one / len(pack) * 1e9 for one in seen))
    return found


def run(*, quick: bool, log: Path) -> list[Figure]:  # noqa: ARG001 - as every benchmark
    apart = len(os.sched_getaffinity(0)) >= 2 * RELAY_CORES
    where = "clients on other cores" if apart else "by processor time"
    found = measure(quick=quick, apart=apart)
    figures = []
    for way in ("upload", "download"):
        one, two = ([1 / seen[0 if apart else 1] for seen in found[way, count]] for count in (1, 2))
        print(f"{way}, {where}: 1 process {p50(one):.2f} GB/s, 2 processes {p50(two):.2f} GB/s", flush=True)
        figures.append(
            Figure(
                f"{way} through a relay of 2 processes, {where}",
                "GB/s",
                "p50",
                two,
                one,
                Limit(times_theirs=FASTER),
                more_is_better=True,
                beside="1 process",
                definition=f"1 GiB in chunks of 8 MiB over {STREAMS} connections; {where}",
                also={
                    f"{what}_seconds_per_gb_by_processes": {n: p50([seen[i] for seen in found[way, n]]) for n in (1, 2)}
                    for i, what in enumerate(("wall", "processor"))
                },
            )
        )
    return figures
