"""A job of 1,024 groups with real sessions: its lighthouses, its metrics service, and its dashboard.

``round``: quorums as fast as they form, at several sizes (``quorum_round.py``). ``job``: 1,024 groups with steps of a
second, two lighthouses on a real etcd, telemetry of every group to one metrics service. In turn a group is killed, a
group joins, and the leading lighthouse is killed, while every route of the metrics service is asked.
"""

from __future__ import annotations

import array
import contextlib
import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from figures import Figure, Limit, p50
from sides import HERE, ROOT, free_port, stop

sys.path.insert(0, str(ROOT))

import itertools

from tests.support.services.etcd_server import EtcdCluster

GROUPS, QUICK_GROUPS = 1024, 128
PROCESSES = 4
STEP_SECONDS = 1.0
CHANGES, QUICK_CHANGES = 3, 2
START_SECONDS = 180.0
SETTLE_SECONDS = 8.0
"""Of steps without an event, before each one."""
BEAT_SECONDS = 0.01
"""Between two questions to the loop of the metrics service."""
JOB_PATH = "/v1/jobs/bench"
ROUTES = ("now", "timeline", "steps", "goodput", "stragglers", "transfers", "failures", "events", "incidents")
RANGE = "?since={since:.0f}&points=1000"


@dataclass
class Seen:
    """Measurements of one run of the job. Times in seconds."""

    first_quorum: float = 0.0
    """From the first request to the last answer of the first quorum."""
    losses: list[float] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    takeovers: list[float] = field(default_factory=list)
    takeover_cpu: list[float] = field(default_factory=list)
    """Processor time of the next leader from the kill to its last answer, and of the steps after it."""
    round_ends: list[float] = field(default_factory=list)
    """From the first to the last answer of a quorum without an event."""
    answers: dict[str, list[float]] = field(default_factory=dict)
    """By route of the metrics service."""
    sizes: dict[str, int] = field(default_factory=dict)
    beats: list[float] = field(default_factory=list)
    """Answers of ``/healthz`` of the metrics service, all through the run."""
    memory_mib: dict[str, float] = field(default_factory=dict)


class Process:
    """A process that answers with lines; ``expect`` reads one."""

    def __init__(self, log: Path, *command: object) -> None:
        with log.open("ab") as errors:
            self.popen = subprocess.Popen(
                [str(part) for part in command],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log

    def expect(self, word: str) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline().strip()
        if word not in line:
            raise RuntimeError(f"a process said {line!r} instead of {word!r}; see {self._log}")
        return line

    def tell(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def memory_mib(self) -> float:
        return psutil.Process(self.popen.pid).memory_info().rss / 2**20

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.popen.pid).cpu_times()
        return times.user + times.system


class Mesh:
    """Etcd, two lighthouses, a metrics service, and the processes with the groups."""

    def __init__(self, groups: int, folder: Path, log: Path, stack: contextlib.ExitStack) -> None:
        self.groups, self._folder, self._log, self._stack = groups, folder, log, stack
        etcd = stack.enter_context(EtcdCluster(folder / "etcd"))
        self.ports = [free_port(), free_port()]
        self.addresses = ",".join(f"http://127.0.0.1:{port}" for port in self.ports)
        self._store = f"{etcd.address}/bench"
        self.lighthouses = [self._lighthouse(port) for port in self.ports]
        service = ("metrics", "--bind", "127.0.0.1:0", "--lighthouse", self.addresses, "--data-dir", folder / "metrics")
        self.metrics = self._keepstep(*service, "--insecure")
        self.url = self.metrics.expect("http").split()[1]
        self.clients: list[Process] = []
        self.outs: list[Path] = []

    def _keepstep(self, *arguments: object) -> Process:
        one = Process(self._log, sys.executable, "-m", "keepstep_cli", *arguments, "--log-level", "warning")
        self._stack.callback(stop, one.popen)
        return one

    def _lighthouse(self, port: int) -> Process:
        limits = ("--min-replicas", self.groups // 2, "--store", self._store, "--heartbeat-timeout", 30)
        return self._keepstep("lighthouse", "--bind", f"127.0.0.1:{port}", *limits, "--insecure")

    def start_groups(self, first: int, count: int) -> Process:
        out = self._folder / f"{first}.out"
        flags = ("--addresses", self.addresses, "--metrics", self.url, "--first", first, "--count", count)
        command = (HERE / "scale_clients.py", *flags, "--step-seconds", STEP_SECONDS, "--out", out)
        one = Process(self._log, sys.executable, *command)
        self._stack.callback(stop, one.popen)
        self.outs.append(out)
        self.clients.append(one)
        return one

    def leader(self) -> int:
        """Return which lighthouse leads; it has a standby, if both run."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for number, port in enumerate(self.ports):
                with contextlib.suppress(OSError):
                    text = fetch(f"http://127.0.0.1:{port}/metrics").decode()
                    if "\nkeepstep_lighthouse_ready 1.0\n" in text and "\nkeepstep_lighthouse_standbys 1.0\n" in text:
                        return number
            time.sleep(0.1)  # a lighthouse tells no client that it leads and is followed
        raise TimeoutError("no lighthouse leads with a standby")

    def kill_lighthouse(self, number: int) -> None:
        """Kill a lighthouse; ``restart`` starts it again."""
        self.lighthouses[number].popen.kill()
        self.lighthouses[number].popen.wait(10)

    def restart(self, number: int) -> None:
        self.lighthouses[number] = self._lighthouse(self.ports[number])


def steps_without_an_event() -> None:
    time.sleep(SETTLE_SECONDS)  # these steps are measured, and an event changes none of them


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        content: bytes = answer.read()
        return content


@contextlib.contextmanager
def beating(url: str, found: list[float]) -> Iterator[None]:
    """Ask the service all the time, over one connection."""
    ended = threading.Event()

    def beat() -> None:
        where = urlsplit(url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        while not ended.wait(BEAT_SECONDS):
            began = time.monotonic()
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            found.append(time.monotonic() - began)
        connection.close()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def play(groups: int, changes: int, log: Path) -> Seen:
    """Run the job and return what was seen."""
    seen = Seen()
    marks: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        mesh = Mesh(groups, Path(name), log, stack)
        mesh.leader()
        share = groups // PROCESSES
        for number in range(PROCESSES):
            mesh.start_groups(number * share, share)
        victims = [mesh.start_groups(groups + number, 1) for number in range(changes)]
        steady = [one for one in mesh.clients if one not in victims]
        for client in mesh.clients:
            client.expect("connected")
        marks.append(("start", time.monotonic()))
        for client in mesh.clients:
            client.tell()
        stack.enter_context(beating(mesh.url, seen.beats))
        for number, victim in enumerate(victims):
            steps_without_an_event()
            marks.append(("loss", time.monotonic()))
            victim.popen.kill()
            victim.popen.wait(10)
            mesh.outs.remove(Path(name) / f"{groups + number}.out")
            steps_without_an_event()
            joiner = mesh.start_groups(groups + changes + number, 1)
            steady.append(joiner)
            joiner.expect("connected")
            marks.append(("join", time.monotonic()))
            joiner.tell()
        steps_without_an_event()
        ask_all(mesh.url, seen)
        for _ in range(changes):
            leader = mesh.leader()
            for role, one in zip(("leader", "standby"), (leader, 1 - leader), strict=True):
                seen.memory_mib[role] = max(seen.memory_mib.get(role, 0.0), mesh.lighthouses[one].memory_mib())
            standby = mesh.lighthouses[1 - leader]
            before = standby.cpu_seconds()
            marks.append(("takeover", time.monotonic()))
            mesh.kill_lighthouse(leader)
            steps_without_an_event()
            seen.takeover_cpu.append(standby.cpu_seconds() - before)
            mesh.restart(leader)
            steps_without_an_event()
        seen.memory_mib["metrics"] = mesh.metrics.memory_mib()
        seen.memory_mib["client, per group"] = steady[0].memory_mib() / share
        marks.append(("end", time.monotonic()))
        for client in steady:
            client.tell()
        for client in steady:
            client.expect("done")
        answers = [one for out in mesh.outs for one in read(out)]
    conclude(seen, marks, answers, groups)
    return seen


def ask_all(url: str, seen: Seen) -> None:
    """Ask each route several times."""
    paths = {"/metrics": "/metrics", "/v1/jobs": "/v1/jobs"}
    paths |= {one: f"{JOB_PATH}/{one}{RANGE.format(since=time.time() - 900)}" for one in ROUTES}
    for _ in range(5):
        for route, path in paths.items():
            began = time.monotonic()
            body = fetch(url + path)
            seen.answers.setdefault(route, []).append(time.monotonic() - began)
            seen.sizes[route] = len(body)


def read(out: Path) -> Iterator[tuple[float, ...]]:
    """Yield (monotonic time, group, quorum_id, step)."""
    numbers = array.array("d")
    numbers.frombytes(out.read_bytes())
    return zip(*(iter(numbers),) * 4, strict=True)


def conclude(seen: Seen, marks: list[tuple[str, float]], answers: list[tuple[float, ...]], joiners_from: int) -> None:
    """Compute the times from the marks and the answers of all groups that lived to the end.

    ``joiners_from``: number of the first group that joined later.
    """
    answers.sort()
    groups = {group for _, group, _, _ in answers if group < joiners_from}
    rounds: dict[tuple[float, float], list[float]] = {}
    for t, _, quorum_id, step in answers:
        rounds.setdefault((quorum_id, step), []).append(t)
    at = {"loss": seen.losses, "join": seen.joins, "takeover": seen.takeovers}
    for (what, began), (_, until) in itertools.pairwise(marks):
        here = [one for one in answers if began <= one[0] < until]
        before = [one for one in answers if one[0] < began]
        if what == "start":
            seen.first_quorum = max(rounds[min(rounds)]) - began
            continue
        newest = max(quorum_id for _, _, quorum_id, _ in before)
        first: dict[float, float] = {}
        for t, group, quorum_id, _ in here:
            if what == "takeover" or quorum_id > newest:
                first.setdefault(group, t)
        if missing := groups - first.keys():
            raise RuntimeError(f"{len(missing)} groups had no answer after a {what}")
        at[what].append(max(first.values()) - (min(first.values()) if what == "join" else began))
    events = [t for _, t in marks]
    for times in rounds.values():
        if len(times) > len(groups) // 2 and all(abs(times[0] - event) > SETTLE_SECONDS / 2 for event in events):
            seen.round_ends.append(max(times) - min(times))


def run(*, quick: bool, log: Path) -> list[Figure]:
    groups, changes = (QUICK_GROUPS, QUICK_CHANGES) if quick else (GROUPS, CHANGES)
    print(f"a job of {groups} groups ...", flush=True)
    return _job(groups, play(groups, changes, log))


def _job(groups: int, seen: Seen) -> list[Figure]:
    title = f"{groups} groups"
    milli: Callable[[list[float]], list[float]] = lambda times: [1000 * one for one in times]  # noqa: E731
    figures = [
        Figure(f"{title}: first quorum", "s", "max", [seen.first_quorum]),
        Figure(f"{title}: answers of one quorum, first to last", "ms", "p50", milli(seen.round_ends)),
        Figure(f"{title}: SIGKILL of a group to the last answer without it", "s", "max", seen.losses),
        Figure(f"{title}: a group joins, answers first to last", "ms", "max", milli(seen.joins)),
        Figure(f"{title}: SIGKILL of the leader to the last answer", "s", "max", seen.takeovers, limit=Limit(value=1)),
        Figure(
            f"{title}: the same, processor time of the next leader",
            "s",
            "max",
            seen.takeover_cpu,
            limit=Limit(value=0.5),
        ),
        Figure(
            f"{title}: longest answer of the metrics service's loop", "ms", "max", milli(seen.beats), limit=Limit(100)
        ),
    ]
    for route, times in seen.answers.items():
        also: dict[str, object] = {"bytes": seen.sizes[route], "max": max(times), "p50": p50(times)}
        figures.append(Figure(f"{title}: metrics service, {route}", "ms", "p50", milli(times), also=also))
        figures.append(Figure(f"{title}: metrics service, {route}, size", "kB", "max", [seen.sizes[route] / 1000]))
    for who, mib in seen.memory_mib.items():
        figures.append(Figure(f"{title}: memory, {who}", "MiB", "max", [mib]))
    return figures
