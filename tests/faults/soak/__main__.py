"""Run a real job for a long time under the faults of ``keepstep chaos``, and check every promise at its end.

make soak SECONDS=3600 SEED=1
make soak SECONDS=600 SEED=2 SOAK="--keep --groups 3"
make soak SECONDS=3600 SOAK=--slow
python -m tests.faults.soak --total

Four groups train with an ElasticSampler, under two lighthouses with an etcd, a relay and a metrics service with a small
disk each; each process is in a network namespace of its own. Needs root and iproute2. The results of each run are in a
folder of ``.soak``; ``--total`` adds them up.

Trainers are forked from a process that has imported torch. A start of Python takes seconds of processor time, and most
faults would wait for one. Their memory is bounded where it is not ours: see ``BOUNDS``.

``--slow`` brings no faults: instead, some steps of the groups take up to 200 s (``SLOW`` in ``trainer.py``).

Exit code: that of ``keepstep chaos`` (7: the job is wedged), or 1 if the job did not finish, a sample was counted twice
or not at all, or a group was ended for a hang that was none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.histories.report import summary_lines, verdict, violation_lines
from keepstep_mesh.faults import CHAOS_ENV
from tests.faults.soak import accounting, total
from tests.faults.soak.accounting import UNTIL_TOLD, false_verdicts, problems
from tests.support.network import namespaces
from tests.support.network.namespaces import Host, Namespaces
from tests.support.network.ports import free_port
from tests.support.processes import forked
from tests.support.services.etcd_server import EtcdCluster

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / ".soak"
"""Git-ignored."""
SAMPLES, BATCH = 300, 32
"""As in ``trainer.py``."""
JOB = "soak"
RELAY_BYTES, METRICS_BYTES = 16 << 20, 64 << 20
"""Of the disks of the services."""
BOUNDS = {"TORCH_FR_BUFFER_SIZE": "100", "MALLOC_ARENA_MAX": "2"}
"""Variables of all processes. torch keeps a record of its last 2000 collectives, a KiB each, and glibc up to eight
arenas for each processor: a trainer would grow until it has both."""
SLOW_STEPS = 0.002
"""Part of the steps of a group that take long with ``--slow``."""
LAST_STEPS = 200
"""After the last fault."""
FINISH_SECONDS = 180.0
START_SECONDS = 120.0
KEEPSTEP = (sys.executable, "-m", "keepstep_cli")


class Soak:
    """The processes of one soak. ``folder``: for logs and data."""

    def __init__(self, folder: Path, network: Namespaces, groups: int) -> None:
        self.folder, self._network, self._groups = folder, network, groups
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.lighthouses: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def host(self, name: str) -> Host:
        return self._network.host(name)

    def start(self, name: str, host: Host, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            words = [*host.command, *command]
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", CHAOS_ENV: str(self.folder / "orders"), **variables}
            start = subprocess.Popen if forked.FORKS in variables else forked.UsualPopen
            process = start(words, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def service(self, kind: str, name: str, *flags: str) -> str:
        """Start a service on a host of its own; return its address."""
        host = self.host(name)
        bind = f"{host.address}:{free_port()}"
        self.start(name, host, *KEEPSTEP, kind, "--bind", bind, "--insecure", "--log-level", "warning", *flags)
        return f"http://{bind}"

    def start_all(self, etcd: EtcdCluster, disks: Mapping[str, Path], slow_steps: float) -> subprocess.Popen[bytes]:
        """Start the services and the groups; return the ``keepstep run``."""
        limits = ("--store", f"{etcd.address}/soak", "--lease", "3", "--min-replicas", "2")
        for number in range(2):
            log = str(self.logs / f"events-{number}.jsonl")
            self.lighthouses.append(self.service("lighthouse", f"lighthouse-{number}", *limits, "--event-log", log))
        known = ("--lighthouse", ",".join(self.lighthouses))
        for kind, disk in disks.items():
            self.service(kind, kind, *known, "--data-dir", str(disk))
        write_steps(self.folder, UNTIL_TOLD)
        for number in range(self._groups):
            self.host(f"group-{number}")
        prefix = Path(self.host("relay").namespace).name.removesuffix("relay")
        limits = ("--max-restarts", "1000000", "--max-restart-pause", "0.2")
        run = ("run", "--replicas", str(self._groups), *limits, "--job", JOB, *known)
        variables = {"SOAK_FOLDER": str(self.folder), "KEEPSTEP_STEP_LOG": str(self.logs / "steps.jsonl")}
        variables |= {"SOAK_HOSTS": f"{prefix}group-", "SOAK_SLOW": str(slow_steps), forked.FORKS: "yes"}
        command = (*KEEPSTEP, *run, "--", sys.executable, "-u", "-m", "tests.faults.soak.trainer")
        return self.start("run", namespaces.LOOPBACK, *command, **variables)

    def wait_for_commits(self) -> None:
        """Wait until each group has committed a step."""
        deadline = time.monotonic() + START_SECONDS
        while len(list(self.folder.glob("*.digests"))) < self._groups:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the groups do not train:\n{(self.folder / 'run.log').read_text()[-4000:]}")
            time.sleep(0.2)  # until another process has created the file

    def step(self) -> int:
        """Return the highest committed step."""
        return max(record["step"] for record in accounting.read(self.folder) if record["event"] == "committed")

    def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def write_steps(folder: Path, steps: int) -> None:
    part = folder / "steps.part"
    part.write_text(str(steps))
    part.rename(folder / "steps")


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, timeout=10)


def chaos_command(soak: Soak, etcd: EtcdCluster, options: argparse.Namespace) -> Sequence[str]:
    nodes = etcd.address.removeprefix("etcd://").split(",")
    return [
        *(*KEEPSTEP, "chaos", "--job", JOB, "--lighthouse", ",".join(soak.lighthouses), "--yes", "--restart-services"),
        *("--seed", str(options.seed), "--seconds", str(options.seconds), "--results", str(options.results)),
        *("--logs", str(soak.logs), "--digests", str(soak.folder), "--at-most", str(options.at_most)),
        *("--mean-seconds-between", str(options.mean_seconds_between), "--longest", str(options.longest)),
        *("--wedge", str(options.wedge), "--samples-per-step", str(BATCH)),
        *(word for node in nodes for word in ("--etcd", f"http://{node}")),
    ]


def check(
    soak: Soak, run: subprocess.Popen[bytes], results: Path, finish_seconds: float = FINISH_SECONDS
) -> tuple[int, list[str]]:
    """Let the job finish, and return the number of checked samples, and the broken promises."""
    broken = []
    write_steps(soak.folder, soak.step() + LAST_STEPS)
    try:
        if code := run.wait(finish_seconds):
            broken.append(f"keepstep run ended with {code}")
    except subprocess.TimeoutExpired:
        broken.append(f"the job did not finish within {finish_seconds:g} s")
    counted, wrong = problems(accounting.read(soak.folder), SAMPLES)
    print(f"samples: {counted:,} counted, {len(wrong)} problems")
    report = check_files([soak.logs])
    print(*summary_lines(report), *violation_lines(report), verdict(report), sep="\n")
    broken += wrong if counted else ["no samples were counted"]
    events = [json.loads(line) for log in soak.logs.glob("events-*.jsonl") for line in log.read_text().splitlines()]
    faults = json.loads(results.read_text())["each"] if results.exists() else []
    ended = false_verdicts(events, faults)
    print(f"verdicts on groups that hang: {sum(one['kind'] == 'hung' for one in events)}, {len(ended)} false")
    broken += ended
    return counted, broken if report.fine else [*broken, verdict(report)]


def train_slowly(soak: Soak, run: subprocess.Popen[bytes], options: argparse.Namespace) -> int:
    """Let the job train without faults; return the exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(options.seconds)
    _, broken = check(soak, run, options.results / "results.json", FINISH_SECONDS + 240)
    slow = [json.loads(line) for log in soak.folder.glob("*.slow") for line in log.read_text().splitlines()]
    kinds = Counter(one["kind"] for one in slow)
    print(f"slow steps: {len(slow)}, {sum(one['seconds'] for one in slow):.0f} s: {dict(kinds)}")
    print(*(f"BROKEN: {sentence}" for sentence in broken), sep="\n")
    return 1 if broken else 0


def play(options: argparse.Namespace, folder: Path, stack: ExitStack) -> int:
    network = stack.enter_context(Namespaces())
    etcd = stack.enter_context(EtcdCluster(folder / "etcd", host=network.host("etcd")))
    soak = Soak(folder, network, options.groups)
    stack.callback(soak.end)
    sizes = {"relay": RELAY_BYTES, "metrics": METRICS_BYTES}
    disks = {name: stack.enter_context(small_disk(folder / f"{name}-data", size)) for name, size in sizes.items()}
    run = soak.start_all(etcd, disks, SLOW_STEPS if options.slow else 0.0)
    soak.wait_for_commits()
    if options.slow:
        return train_slowly(soak, run, options)
    code = forked.UsualPopen(chaos_command(soak, etcd, options), cwd=ROOT).wait()
    results = options.results / "results.json"
    counted, broken = check(soak, run, results)
    for sentence in broken:
        print(f"BROKEN: {sentence}")
    if results.exists():
        found = {**json.loads(results.read_text()), "samples": counted, "soak_broken": broken}
        results.write_text(json.dumps(found, indent=1) + "\n")
    return code or (1 if broken else 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description="A real job under random faults.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--at-most", type=int, default=5, help="of them at most two groups and one lighthouse")
    parser.add_argument("--mean-seconds-between", type=float, default=0.2, help="mean pause between two faults")
    parser.add_argument("--longest", type=float, default=6.0, help="longest fault, in seconds")
    parser.add_argument("--wedge", type=float, default=60.0, help="seconds without a commit; more on a busy machine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="each run has a folder in it")
    parser.add_argument("--slow", action="store_true", help="no faults, and groups with slow steps")
    parser.add_argument("--total", action="store_true", help="add up the results of all runs, and run nothing")
    parser.add_argument("--keep", action="store_true", help="keep all logs, also if no promise was broken")
    options = parser.parse_args()
    if options.total:
        found = total.read(options.results)
        print(*total.lines(found), sep="\n")
        return 1 if found.broken() or not found.runs else 0
    if (why_not := namespaces.why_not()) is not None:
        print(why_not, file=sys.stderr)
        return 2
    options.results /= f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-seed-{options.seed}"
    options.results.mkdir(parents=True)
    os.environ |= {**BOUNDS, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    forked.install()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through the ends of all contexts
    folder = Path(tempfile.mkdtemp(prefix="keepstep-soak-"))
    code = 1
    try:
        with ExitStack() as stack:
            code = play(options, folder, stack)
    finally:
        forked.close()
        if code or options.keep:
            shutil.rmtree(options.results / "logs", ignore_errors=True)
            shutil.copytree(folder, options.results / "logs", ignore=shutil.ignore_patterns("etcd", "*-data", "orders"))
        shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
