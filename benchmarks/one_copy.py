"""Measure a model that exists once: what the loss of a rank costs, beside torchrun and a checkpoint; and each step.

Four ranks on this machine shard a model with FSDP2 and Gloo. One of them gets SIGKILL while all commit; the figure is
the time to the next commit of all ranks. keepstep runs with a spare, and with 64 MB also without: the model is cut
again for three ranks. On the other side torchrun restarts all ranks, which load the newest of the checkpoints that
torch.distributed.checkpoint writes every ten steps. The steps that are repeated are those from the checkpoint to the
kill; keepstep repeats the open one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from figures import Figure, Limit, p50
from one_copy_trainer import LAYER_BYTES
from sides import HERE, Side, keepstep_side, lighthouse, stop

RANKS = 4
PEER = "torchrun and DCP"
EVERY = 10
"""Steps between two checkpoints of the other side."""
SPARES = {"with a spare": 1, "without": 0}
STATES = {"64 MB": (64e6, 3, (*SPARES,)), "1 GB": (1e9, 1, ("with a spare",))}
"""Bytes of the state, number of kills, and the numbers of spares that are tried."""
STEP_RANKS, STEP_LAYERS, STEP_BATCH, STEPS = 2, 8, 384, 24
LIMIT_SECONDS = 180.0
MANY = 10**6
STEPS_BEFORE = 7
"""Of all ranks, before one is killed. The first two are not those of an undisturbed job."""


class Ranks:
    """The lines that the ranks of a run have written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self) -> dict[int, list[tuple[float, int, int]]]:
        """Return the time, the step and the bytes of copies of each commit, by process."""
        found = {}
        for file in self.folder.glob("[0-9]*"):
            rows = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found[int(file.name)] = [(float(when), int(step), int(kept)) for when, step, kept, _ in rows]
        return found

    def wait(self, processes: int, step: int) -> dict[int, list[tuple[float, int, int]]]:
        """Wait until so many living processes have committed ``step``. Return their lines."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            lines = self.lines()
            reached = {
                pid: rows
                for pid, rows in lines.items()
                if rows and rows[-1][1] >= step and Path(f"/proc/{pid}").exists()
            }
            if len(reached) >= processes:
                return reached
            time.sleep(0.01)  # files announce nothing
        raise RuntimeError(f"{processes} ranks did not reach step {step} within {LIMIT_SECONDS:g} s")

    def resumed(self, after: float, processes: int, *, new: bool, old: set[int]) -> tuple[float, int]:
        """Return when so many processes have committed after a kill, and the first step of them.

        Args:
            after: time of the kill.
            processes: number of them.
            new: count processes only that were started after the kill.
            old: processes from before.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            firsts = []
            for pid, rows in self.lines().items():
                if new and pid in old:
                    continue
                later = [(when, step) for when, step, _ in rows if when > after]
                firsts += later[:1]
            if len(firsts) >= processes:
                firsts.sort()
                return firsts[processes - 1][0], min(step for _, step in firsts)
            time.sleep(0.01)  # files announce nothing
        raise RuntimeError(f"no commit within {LIMIT_SECONDS:g} s after a kill")


def command(side: Side, library: str, folder: Path, layers: int, batch: int, steps: int, every: int = 0) -> list[str]:
    words = [side.python, HERE / "one_copy_trainer.py", "--library", library, "--out", folder, "--layers", layers]
    return [str(word) for word in (*words, "--batch", batch, "--steps", steps, "--every", every)]


@contextlib.contextmanager
def running(side: Side, words: Sequence[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, and end it with all that it has started."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            words,
            env={**side.environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if "torch.distributed.run" in words:
            stop(process)  # it ends its ranks, which have sessions of their own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def ours(side: Side, members: int, words: Sequence[str], log: Path, min_replicas: int, spares: int) -> Iterator[None]:
    """Run a job of keepstep."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(lighthouse(side, min_replicas=min_replicas, log=log))
        for number in range(members + spares):
            variables = {
                "KEEPSTEP_LIGHTHOUSE": server.address,
                "REPLICA_GROUP_ID": str(number),
                "NUM_REPLICA_GROUPS": str(members + spares),
                **({"KEEPSTEP_SPARES": str(spares)} if spares else {}),
            }
            stack.enter_context(running(side, words, log, **variables))
        yield


def torchrun(
    side: Side, ranks: int, words: Sequence[str], log: Path, restarts: int = 9
) -> contextlib.AbstractContextManager[object]:
    """Run a job under torchrun, which restarts it."""
    launcher = [str(side.python), "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--standalone", "--max-restarts", str(restarts), "--monitor-interval", "0.05"]
    return running(side, [*launcher, *words[1:]], log)


def undisturbed(lines: dict[int, list[tuple[float, int, int]]]) -> float:
    """Return the median of the seconds of a step, but the first two of each rank."""
    times = [[when for when, _, _ in rows[2:]] for rows in lines.values()]
    return p50([later - earlier for one in times for earlier, later in itertools.pairwise(one)])


def repeated(lines: dict[int, list[tuple[float, int, int]]], killed: float) -> int:
    """Return the most steps that a process committed before a kill and had to commit again after it."""
    most = 0
    for rows in lines.values():
        before = [step for when, step, _ in rows if when <= killed]
        after = [step for when, step, _ in rows if when > killed]
        if before and after:
            most = max(most, before[-1] + 1 - min(after))
    return most


def kill_ours(side: Side, layers: int, spares: int, log: Path) -> tuple[float, float, float, int]:
    """Return the seconds from SIGKILL of a rank to the next commit of all, and of a step before it; copies by bytes of
    the shard; and the steps that are repeated."""
    with tempfile.TemporaryDirectory() as folder:
        ranks, left = Ranks(Path(folder)), RANKS if spares else RANKS - 1
        words = command(side, "keepstep", Path(folder), layers, 4, MANY)
        with ours(side, RANKS, words, log, left, spares):
            deadline = time.monotonic() + LIMIT_SECONDS
            while len(list(Path(folder).glob("ready-*"))) < RANKS + spares and time.monotonic() < deadline:
                time.sleep(0.05)  # files announce nothing
            lines = ranks.wait(RANKS, STEPS_BEFORE)
            shard = layers * LAYER_BYTES / RANKS
            copies = max(rows[-1][2] for rows in lines.values()) / shard
            victim = sorted(lines)[1]
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            resumed, _ = ranks.resumed(killed, left, new=False, old=set())
            return resumed - killed, undisturbed(lines), copies, repeated(ranks.lines(), killed)


def kill_theirs(side: Side, layers: int, log: Path, at: int) -> tuple[float, float, int]:
    """Return the seconds from SIGKILL of a rank to the next step of all, and of a step before it; and the steps that
    are repeated."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder))
        with torchrun(side, RANKS, command(side, "torch", Path(folder), layers, 4, MANY, EVERY), log):
            lines = ranks.wait(RANKS, EVERY + at)
            killed = time.time()
            os.kill(sorted(lines)[1], signal.SIGKILL)
            reached = max(rows[-1][1] for rows in ranks.lines().values())
            resumed, first = ranks.resumed(killed, RANKS, new=True, old=set(lines))
            return resumed - killed, undisturbed(lines), reached - (first - 1)


def step_seconds(side: Side, library: str, steps: int, log: Path) -> list[float]:
    """Return the seconds of each step of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        words = command(side, library, Path(folder), STEP_LAYERS, STEP_BATCH, MANY)
        job = (
            ours(side, STEP_RANKS, words, log, STEP_RANKS, 0)
            if library == "keepstep"
            else torchrun(side, STEP_RANKS, words, log)
        )
        with job:
            lines = Ranks(Path(folder)).wait(STEP_RANKS, steps + 8)
        times = [when for when, _, _ in next(iter(lines.values()))][8:]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def run(*, quick: bool, log: Path) -> list[Figure]:
    side, figures = keepstep_side(), []
    for name, (size, most, tried) in list(STATES.items())[: 1 if quick else None]:
        kills = 1 if quick else most
        layers = max(1, round(size / LAYER_BYTES))
        whole: dict[str, list[float]] = {how: [] for how in (*tried, PEER)}
        less: dict[str, list[float]] = {how: [] for how in (*tried, PEER)}
        copies, lost, their_lost = [], [], []
        for number in range(kills):
            print(f"one copy, {name} of state, kill {number + 1} of {kills} ...", flush=True)
            for how in tried:
                seconds, step, share, steps = kill_ours(side, layers, SPARES[how], log)
                whole[how].append(seconds)
                less[how].append(seconds - step)
                copies += [share] if SPARES[how] else []
                lost.append(float(steps))
            seconds, step, steps = kill_theirs(side, layers, log, 1 + number * EVERY // kills)
            whole[PEER].append(seconds)
            less[PEER].append(seconds - step)
            their_lost.append(float(steps))
        limit, rest = Limit(value=1.0, times_theirs=0.1), "the same less an undisturbed step"
        what = f"SIGKILL of 1 of {RANKS} ranks to the next commit of all, {name} of state"
        figures += [
            *(Figure(f"{what}, {how}", "s", "p50", whole[how], whole[PEER], limit, beside=PEER) for how in tried),
            *(Figure(f"{rest}, {how}, {name}", "s", "p50", less[how], less[PEER], beside=PEER) for how in tried),
            Figure(f"steps lost, {name} of state", "steps", "max", lost, their_lost, Limit(0.0), beside=PEER),
            Figure(f"host memory of copies by bytes of the shard, {name}", "x", "max", copies, [], Limit(value=2.2)),
        ]
    added, plain = [], []
    for _ in range(1 if quick else 2):
        alone = step_seconds(side, "torch", STEPS, log)
        with_copies = step_seconds(side, "keepstep", STEPS, log)
        plain += alone
        added.append(100 * (p50(with_copies) / p50(alone) - 1))
    name = f"step of one copy, added to plain FSDP2 ({p50(plain) * 1e3:.0f} ms)"
    return [*figures, Figure(name, "%", "p50", added, [], Limit(value=3.0))]
