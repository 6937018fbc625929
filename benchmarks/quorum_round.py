"""Duration of a quorum round, with the lighthouse in a process of its own and its clients in four others.

Every client requests the next quorum as soon as it has its answer. A round ends when the last client has its answer;
its duration is the time since the end of the previous round. Steps grow from round to round as in training.

``steady``: no group joins or leaves. ``joins``: in every tenth round one more group joins and stays; a join is the only
change that costs neither side a timeout (torchft has no graceful leave). ``LighthouseClient``: as ``steady``, but both
sides use the blocking class of that name, with one thread for each group.
"""

from __future__ import annotations

import array
import contextlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, Limit, p50
from sides import HERE, Side, lighthouse, stop

PROCESSES = 4
WARM_UP = 10
SIZES = (1, 8, 64, 256, 1024)
ALONE_FROM = 1024
"""From this size on only ours is measured."""
ROUNDS = {1: 2000, 8: 1000, 64: 300, 256: 100, 1024: 60}
TRAINER_USES = {"keepstep": "session", "torchft": "client"}
CLIENT_LIMITS = {1: 0.8, 8: 0.6, 64: 0.3, 256: 0.2}
"""Sizes at which both sides are measured through their blocking ``LighthouseClient``, and the limits of the ratio."""
JOINS = 5
JOINS_FROM = 8
"""From this size on joins are measured, where both sides are: 256 clients of one process that each read a list of 1024
take longer for it than the heartbeat timeout, which no trainer would."""
REPEATS = 1
HEARTBEAT_TIMEOUT_S = 60
"""So that none of hundreds of clients in one process is given up while the others read their first member list."""
LIMITS = {
    1: Limit(times_theirs=1),
    8: Limit(times_theirs=1),
    64: Limit(times_theirs=1 / 3),
    256: Limit(times_theirs=1 / 5),
    1024: Limit(value=60),
}


@dataclass(frozen=True)
class Run:
    round_ms: list[float]
    lighthouse_cpu_ms: float
    """Per round."""
    client_cpu_ms: float
    """Per round, all clients together."""


def measure(side: Side, size: int, rounds: int, spares: int, log: Path, *, through: str = "") -> Run:
    """One run with a fresh lighthouse. ``through``: see ``quorum_clients.py``; empty: what the side's trainer uses."""
    total = rounds + WARM_UP
    with (
        lighthouse(side, min_replicas=size, log=log, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S) as server,
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
    ):
        processes = min(PROCESSES, size)
        outs = [Path(folder) / str(number) for number in range(processes)]
        clients = []
        for number, out in enumerate(outs):
            client = _client(
                side,
                log,
                through=through or TRAINER_USES[side.name],
                address=server.address,
                first=number * 100_000,
                count=size // processes,
                rounds=total,
                warm_up=WARM_UP - 1,
                spares=spares if number == 0 else 0,
                out=out,
            )
            stack.callback(stop, client)
            clients.append(client)
        for client in clients:
            _expect(client, "connected", log)
        for client in clients:
            client.stdin.write("go\n")
            client.stdin.flush()
        for client in clients:
            _expect(client, "warm", log)
        cpu = server.cpu_seconds()
        for client in clients:
            _expect(client, "done", log)
        cpu = server.cpu_seconds() - cpu
        times = [_read(out) for out in outs]
    ends = [max(one[number] for one in times) for number in range(total)]
    round_ms = [(after - before) * 1e3 for before, after in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    return Run(round_ms, cpu / rounds * 1e3, sum(one[-1] for one in times) / rounds * 1e3)


def _client(side: Side, log: Path, **flags: object) -> subprocess.Popen[str]:
    command = [side.python, HERE / "quorum_clients.py", "--side", side.name]
    for flag, value in flags.items():
        command += [f"--{flag.replace('_', '-')}", str(value)]
    with log.open("ab") as errors:
        return subprocess.Popen(
            command,
            env=side.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def _expect(client: subprocess.Popen[str], line: str, log: Path) -> None:
    said = client.stdout.readline().strip()
    if said != line:
        ended = f" and ended with {client.wait(10)}" if not said else ""
        raise RuntimeError(f"a quorum client said {said!r}{ended} instead of {line!r}; see {log}")


def _read(path: Path) -> array.array[float]:
    numbers = array.array("d")
    numbers.frombytes(path.read_bytes())
    return numbers


def run(ours: Side, theirs: Side, *, quick: bool, log: Path, sizes: tuple[int, ...] = SIZES) -> list[Figure]:
    figures = []
    for size in sizes:
        sides = (theirs, ours) if size < ALONE_FROM else (ours,)
        steady = max(20, ROUNDS[size] // (4 if quick else 1))
        scenes = [("steady", steady, 0, "")]
        if JOINS_FROM <= size < ALONE_FROM:
            scenes.append(("joins", 10 * JOINS, JOINS, ""))
        if size in CLIENT_LIMITS:
            scenes.append(("LighthouseClient", steady, 0, "client"))
        for scene, rounds, spares, through in scenes:
            runs: dict[str, list[Run]] = {ours.name: [], theirs.name: []}
            for _ in range(1 if quick else REPEATS):
                for side in sides:
                    print(f"quorum round, N={size}, {scene}: {side.name} ...", flush=True)
                    runs[side.name].append(measure(side, size, rounds, spares, log, through=through))
            figures += _figures(size, scene, runs[ours.name], runs[theirs.name])
    return figures


def _figures(size: int, scene: str, ours: list[Run], theirs: list[Run]) -> list[Figure]:
    def rounds(runs: list[Run]) -> list[float]:
        return [one for run in runs for one in run.round_ms]

    also: dict[str, object] = {
        "p50_of_each_run": {
            "keepstep": [p50(run.round_ms) for run in ours],
            "torchft": [p50(run.round_ms) for run in theirs],
        },
        "client_cpu_ms_per_round": {
            "keepstep": [run.client_cpu_ms for run in ours],
            "torchft": [run.client_cpu_ms for run in theirs],
        },
    }
    title = f"quorum round, N={size}, {scene}"
    definition = "time between the ends of successive rounds; a round ends when the last client has its answer"
    limit = Limit(times_theirs=CLIENT_LIMITS[size]) if scene == "LighthouseClient" else LIMITS[size]
    found = [Figure(title, "ms", "p50", rounds(ours), rounds(theirs), limit, definition=definition, also=also)]
    if scene == "joins":
        found.append(Figure(f"{title}, mean", "ms", "mean", rounds(ours), rounds(theirs), definition=definition))
    cpu_limit = Limit(times_theirs=1 / 4) if size == 256 else None
    cpu = "processor time of all threads of the lighthouse process, divided by rounds (one sample a run)"
    found.append(
        Figure(
            f"{title}, lighthouse CPU",
            "ms",
            "p50",
            [run.lighthouse_cpu_ms for run in ours],
            [run.lighthouse_cpu_ms for run in theirs],
            cpu_limit,
            definition=cpu,
        )
    )
    return found
