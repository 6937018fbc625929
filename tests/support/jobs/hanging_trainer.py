"""A replica group for tests that hangs or ends on request. It prints lines as ``trainer.py`` does. It reads variables:

TRAINER_HANG       file; while it has a kind of hang below, the next step hangs so. With a space and a
                   group behind it, only that group does
TRAINER_FIFO       FIFO that no process writes to, for the kind ``fifo``
TRAINER_HANG_RANK  rank of the group that hangs; default 0
TRAINER_COMPILE    seconds of the first step, as a compilation takes them
TRAINER_PREPARE    seconds between the start of the Manager and the first step

``loop`` (``while True: pass``), ``lock``, ``loader`` (a worker of a DataLoader never answers), ``fifo``, ``skip`` (the
rank leaves out an all-reduce), ``section`` (a section that is declared; it ends when the file is gone), ``slow`` (works
on without a step until the file is gone), ``gil`` (C code that never lets another thread run), ``inner`` (the rank
leaves out a collective of its group), ``script``: the line of the script is recorded in "hanging". Kinds of
ends: ``raise`` (an exception before the all-reduces of a step), ``late`` (after them), ``exit`` (``sys.exit(7)``),
``crash`` (SIGSEGV), ``memory`` (takes ever more memory).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[3]))

from keepstep import Manager, Optimizer, ProcessGroupGloo
from tests.support.jobs.trainer import PACE, digest, say

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ORDER = Path(os.environ["TRAINER_HANG"])
HANGING_RANK = int(os.environ.get("TRAINER_HANG_RANK", "0"))


def ordered() -> str:
    kind, _, group = ORDER.read_text().partition(" ") if ORDER.exists() else ("", "", "")
    return kind if group in ("", os.environ["REPLICA_GROUP_ID"]) else ""


class Hangs(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        threading.Event().wait()  # for ever: that is what the test asks for
        return index


def busy() -> None:
    while True:
        pass


def work_on() -> None:
    for depth in itertools.count(1):
        if not ordered():
            return
        evaluate_part(depth % 20)


def evaluate_part(depth: int) -> None:
    """Work a bit in a stack of ``depth`` calls, so that the stack changes from one answer to the next."""
    if depth:
        evaluate_part(depth - 1)
    else:
        time.sleep(0.2)  # the work


def hang(kind: str, manager: Manager) -> None:
    if kind in ("raise", "late", "exit", "crash", "memory"):
        ORDER.unlink()  # so that it ends once
    match kind:
        case "loop":
            busy()
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "loader":
            batches: Any = iter(DataLoader(Hangs(), 4, num_workers=1, multiprocessing_context="fork"))
            next(batches)
        case "fifo":
            Path(os.environ["TRAINER_FIFO"]).read_bytes()
        case "section":
            with manager.section("evaluate", timedelta(minutes=10)):
                work_on()
        case "slow":
            work_on()
        case "gil":
            ctypes.PyDLL(None).pause()
        case "raise":
            raise ValueError("bad batch")
        case "exit":
            sys.exit(7)
        case "crash":
            ctypes.string_at(0)
        case "memory":
            taken = []
            while True:
                taken.append(b"x" * (8 << 20))


def main() -> None:
    torch.set_num_threads(1)
    if RANKS > 1:
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    model = nn.Linear(4, 4)
    timeout = timedelta(seconds=float(os.environ.get("TRAINER_TIMEOUT", "60")))
    manager = Manager(
        ProcessGroupGloo(timeout=timeout),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), None)[1],
        state_dict=lambda: {"model": model.state_dict()},
        timeout=timeout,
    )
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    say("started", name=os.environ["REPLICA_GROUP_ID"], replica_id=manager.replica_id())
    first = True
    time.sleep(float(os.environ.get("TRAINER_PREPARE", "0")))  # in place of loading data
    try:
        while True:
            optimizer.zero_grad()
            if first:
                time.sleep(float(os.environ.get("TRAINER_COMPILE", "0")))  # as a compilation does
                first = False
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            kind = ordered() if RANK == HANGING_RANK and manager.current_step() >= 4 else ""
            if kind:
                say("hanging", kind=kind)
                hang(kind, manager)
            if RANKS > 1 and kind != "inner":
                dist.all_reduce(torch.ones(1))
            for place, parameter in enumerate(model.parameters()):
                if parameter.grad is not None and not (kind == "skip" and place):
                    manager.allreduce(parameter.grad)
            if kind == "late":
                raise ValueError("bad batch")
            if optimizer.step():
                say("committed", step=manager.current_step(), digest=digest(model.state_dict()), quorum_id=None)
            else:
                say("discarded", step=manager.current_step())
            time.sleep(PACE)  # pace
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()
