"""How long training stands still when the lighthouse that leads dies. Ours only: torchft's has no standby.

Two lighthouses share a real etcd of one node; two groups train (gloo, a small network, 5 ms between steps in place of
loading data). The leader is sent SIGKILL, or SIGTERM, again and again; the figure is the longest time between two
commits of group 0 from a second before the signal until 100 steps later. The one that died is started again meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from figures import Figure, Limit, p50
from sides import HERE, ROOT, Side, free_port, stop

sys.path.insert(0, str(ROOT / "tests"))
import itertools

from etcd_server import EtcdCluster

KILLS = 50
QUICK_KILLS = 5
STEPS_AFTER = 100
GIVE_UP = 60.0
POLL = 0.02
"""Between two looks at what other processes tell (files of commits, metrics); no figure has it in it."""


class Mesh:
    """Two lighthouses and two trainers."""

    def __init__(self, side: Side, etcd: EtcdCluster, folder: Path, log: Path) -> None:
        self.side, self.etcd, self.folder, self.log = side, etcd, folder, log
        self.ports = [free_port(), free_port()]
        self.lighthouses = [self.start_lighthouse(number) for number in (0, 1)]
        self.leader()
        self.trainers = [self.start_trainer(group) for group in (0, 1)]

    def _start(self, *command: object) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as out:
            return subprocess.Popen(
                [self.side.python, *map(str, command)],
                env=self.side.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def start_lighthouse(self, number: int) -> subprocess.Popen[bytes]:
        store, bind = f"{self.etcd.address}/bench", f"127.0.0.1:{self.ports[number]}"
        return self._start("-m", "keepstep_lighthouse", "--bind", bind, "--store", store, "--min-replicas", 2)

    def start_trainer(self, group: int) -> subprocess.Popen[bytes]:
        addresses = ",".join(f"http://127.0.0.1:{port}" for port in self.ports)
        flags = ("--library", "keepstep", "--lighthouse", addresses, "--group", group, "--groups", 2)
        how = ("--min-replicas", 2, "--pause", 0.005, "--out", self.folder / str(group))
        return self._start(HERE / "trainer.py", *flags, *how)

    def leader(self) -> int:
        deadline = time.monotonic() + GIVE_UP
        while time.monotonic() < deadline:
            for number, port in enumerate(self.ports):
                with contextlib.suppress(OSError):
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/cluster", timeout=1) as answer:
                        told = json.load(answer)
                    address = f"http://127.0.0.1:{port}"
                    if any(node["leads"] and node["address"] == address for node in told["nodes"]):
                        return number
            time.sleep(POLL)
        raise TimeoutError(f"no lighthouse leads; see {self.log}")

    def await_standby(self) -> None:
        """Until the other lighthouse holds its link to the leader."""
        deadline = time.monotonic() + GIVE_UP
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[self.leader()]}/metrics", timeout=5) as answer:
                if b"\nkeepstep_lighthouse_standbys 1.0" in answer.read():
                    return
            time.sleep(POLL)
        raise TimeoutError(f"no lighthouse stands by; see {self.log}")

    def commits(self) -> list[float]:
        """Unix times of the commits of group 0."""
        path = self.folder / "0"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [float(line.split()[0]) for line in lines]

    def await_commits(self, count: int) -> list[float]:
        deadline = time.monotonic() + GIVE_UP
        while len(commits := self.commits()) < count:
            if any(trainer.poll() is not None for trainer in self.trainers):
                raise RuntimeError(f"a trainer ended; see {self.log}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(commits)} commits, not {count}; see {self.log}")
            time.sleep(POLL)
        return commits

    def gap(self, how: signal.Signals) -> float:
        """The longest time between two commits around one end of the leader."""
        leader = self.leader()
        signalled, count = time.time(), len(self.commits())
        victim = self.lighthouses[leader]
        victim.send_signal(how)
        victim.wait(GIVE_UP)
        self.lighthouses[leader] = self.start_lighthouse(leader)
        times = [at for at in self.await_commits(count + STEPS_AFTER) if at > signalled - 1]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def end(self) -> None:
        for process in (*self.trainers, *self.lighthouses):
            stop(process)


def measure(side: Side, how: signal.Signals, times: int, log: Path) -> list[float]:
    with tempfile.TemporaryDirectory() as folder, EtcdCluster(Path(folder) / "etcd") as etcd:
        mesh = Mesh(side, etcd, Path(folder), log)
        try:
            mesh.await_commits(STEPS_AFTER)
            seconds = []
            for _ in range(times):
                mesh.await_standby()
                seconds.append(mesh.gap(how))
                print(f"{seconds[-1]:.3f} ", end="", flush=True)
            print()
            return seconds
        finally:
            mesh.end()


def run(ours: Side, _theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    times = QUICK_KILLS if quick else KILLS
    figures = []
    for how, limit in ((signal.SIGKILL, 1.0), (signal.SIGTERM, 0.2)):
        print(f"{how.name} to the leading lighthouse, {times} times: ", end="", flush=True)
        gaps = measure(ours, how, times, log)
        figures.append(
            Figure(
                f"{how.name} to the leading lighthouse: gap between commits, p95",
                "s",
                "p95",
                gaps,
                limit=Limit(value=limit),
                definition="longest time between two commits around the end of the leader, a standby on the same etcd",
                also={"p50": p50(gaps), "max": max(gaps)},
            )
        )
    return figures
