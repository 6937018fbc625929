"""A replica group of the soak: trains on real digits, each sample in one committed step, and logs what it drew.

Files in SOAK_FOLDER, of JSON lines: ``<group>.samples`` (``drawn`` before a step commits, ``committed`` after it),
``<group>.digests`` (weights after each commit) and ``<group>.slow`` (steps of ``--slow``). The training ends at the
step in the file ``steps``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from keepstep import DistributedDataParallel, ElasticSampler, Manager, Optimizer, ProcessGroupGloo
from tests.faults.soak.accounting import UNTIL_TOLD
from tests.support.jobs.trainer import digest
from tests.support.processes.fork_server import enter

FOLDER = Path(os.environ["SOAK_FOLDER"])
GROUP = os.environ["REPLICA_GROUP_ID"]
SAMPLES = 300
"""Few, for many epochs."""
BATCH = 32
PACE_SECONDS = float(os.environ.get("SOAK_PACE", "0.02"))
WIDTH = int(os.environ.get("SOAK_WIDTH", "256"))
SLOW_STEPS = float(os.environ.get("SOAK_SLOW", "0"))
"""Part of the steps that take long."""
SLOW = {"sleeps": (15, 45), "reads": (30, 200), "waits": (30, 200), "evaluates": (30, 200), "stutters": (30, 90)}
"""Kinds of slow steps, with their shortest and longest time in s. None is a hang."""
WORK = "import time; end = time.monotonic() + {0}\nwhile time.monotonic() < end: sum(range(10**5)); time.sleep(0.01)"
STUTTER = (
    "import os, signal, time; end = time.monotonic() + {0}\nwhile time.monotonic() < end:\n"
    " os.kill({1}, signal.SIGSTOP); time.sleep(0.3); os.kill({1}, signal.SIGCONT); time.sleep(0.05)"
)


def log(file: str, **record: object) -> None:
    line = (json.dumps({"pid": os.getpid(), "t": time.time(), **record}) + "\n").encode()
    descriptor = os.open(FOLDER / f"{GROUP}.{file}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def last_step() -> int:
    return int((FOLDER / "steps").read_text())


def take_long(manager: Manager) -> None:
    """Spend the time of a slow step."""
    kind = random.choice([*SLOW])
    seconds = random.uniform(*SLOW[kind])
    log("slow", kind=kind, seconds=round(seconds, 1), step=manager.current_step())
    until = time.monotonic() + seconds
    match kind:
        case "sleeps":
            time.sleep(seconds)
        case "evaluates":
            with manager.section("evaluate", timedelta(seconds=2 * seconds)):
                time.sleep(seconds)
        case "waits":  # for a child that works
            subprocess.run([sys.executable, "-c", WORK.format(seconds)], check=True, timeout=10 * seconds)
        case _:
            stutters = [sys.executable, "-c", STUTTER.format(seconds, os.getpid())]
            child = subprocess.Popen(stutters) if kind == "stutters" else contextlib.nullcontext()
            with child, Path("/dev/zero").open("rb", buffering=0) as zeros:
                while time.monotonic() < until:
                    zeros.read(1 << 20)  # a loop that only polls would be a hang
                    time.sleep(0.05)


def main() -> None:
    enter(os.environ["SOAK_HOSTS"] + GROUP)  # before the first socket and thread
    torch.set_num_threads(1)
    torch.manual_seed(int(GROUP))
    random.seed()  # not the state of the process that it is forked from
    inputs, targets = (torch.tensor(one[:SAMPLES]) for one in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": adamw}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=15)),
        state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
        load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
        timeout=timedelta(seconds=15),
        quorum_timeout=timedelta(seconds=150),  # above the join_timeout of 60 s, which begins again with a new leader
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw)
    sampler = ElasticSampler(SAMPLES, manager, BATCH, seed=7)
    try:
        while manager.current_step() < last_step():
            share = sampler.draw()
            indices = sampler.indices(share)
            drawn = {
                "rank": manager.participating_rank() if manager.errored() is None else None,
                "groups": manager.num_participants() if manager.errored() is None else 0,
                "epoch": share.position.epoch,
                "start": share.start,
                "stop": share.stop,
                "indices": indices if share.stop > share.start else [],
            }
            log("samples", event="drawn", step=manager.current_step() + 1, **drawn)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs[indices]), targets[indices]) * sampler.weight
            torch.autograd.backward(loss)
            if optimizer.step():
                step, lineage = manager.current_step(), manager.state_dict()["lineage"]
                rank, groups = manager.participating_rank(), manager.num_participants()
                drawn |= {"rank": rank, "groups": groups}
                log("samples", event="committed", step=step, lineage=lineage, **drawn)
                log("digests", step=step, lineage=lineage, digest=digest(model.state_dict(), adamw.state_dict()))
            if random.random() < SLOW_STEPS and last_step() == UNTIL_TOLD:
                take_long(manager)
            time.sleep(PACE_SECONDS)  # leaves processor time to the faults
        end = manager.finish()
        log("digests", step=end.step, lineage="end", digest=digest(model.state_dict(), adamw.state_dict()))
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()
