"""A replica group for tests: trains on real digits until it is drained, and prints each step that it commits.

Each line on standard output is JSON: {"event": "started" | "committed" | "discarded" | "left", "step", "digest", "pid",
"rank", "name", "quorum_id"}. The digest covers model, buffers and optimizer. Environment variables:

TRAINER_STEPS            last step (0: train until drained)
TRAINER_FINISH=1         call ``Manager.finish`` after the last step, and print "finished" with the digest
TRAINER_PACE             seconds to sleep in each step; default 0.03: most steps only pass while a test waits
TRAINER_SYNC=1           synchronous quorum
TRAINER_BATCH_NORM=1     add a batch norm layer
TRAINER_WIDTH            width of the hidden layer
TRAINER_MIN_REPLICAS     ``min_replica_size`` of the Manager
TRAINER_FLIP_AT          step after which one bit of a weight flips
TRAINER_PAUSE_AT         steps, with commas between, at each of which to wait until TRAINER_PAUSE_FILE-<step> exists
TRAINER_HOLD_AT          step after which to print "holding" in the next forward pass, and wait until TRAINER_PAUSE_FILE
                         exists; the quorum has formed
TRAINER_CHUNK_SECONDS    heal directly, and sleep so long after each chunk
TRAINER_HOLD_HEAL_AT     bytes of a direct heal after which to wait until TRAINER_PAUSE_FILE exists
TRAINER_CATCH_UP=1, 0    catch up, or heal, whatever the state is; an event "followed" for each step without weights
TRAINER_WORKERS          forked DataLoader processes that draw the batches; they start after the first committed step,
                         and an event "workers" has their pids
TRAINER_TIMEOUT          seconds of a collective; default 30
TRAINER_TROUBLE          file; while it has the word "own", report an error in each step; "heal": raise in each heal
TRAINER_LOG=info         log level
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

from keepstep import DistributedDataParallel, HTTPTransport, Manager, Optimizer, ProcessGroupGloo
from keepstep.process_group import ProcessGroupBabyGloo
from keepstep.state.values.sharding import is_dtensor

PACE = float(os.environ.get("TRAINER_PACE", "0.03"))


def say(event: str, **detail: object) -> None:
    line = {"event": event, "pid": os.getpid(), "rank": int(os.environ.get("RANK", "0")), "t": time.time(), **detail}
    os.write(1, (json.dumps(line) + "\n").encode())  # not sys.stdout: a signal handler prints too


def digest(*states: dict[str, object]) -> str:
    total = hashlib.blake2b(digest_size=12)

    def feed(value: object) -> None:
        if is_dtensor(value):
            feed(value.to_local())
        elif isinstance(value, torch.Tensor):
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                total.update(str(key).encode())
                feed(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                feed(one)
        else:
            total.update(repr(value).encode())

    for state in states:
        feed(state)
    return total.hexdigest()


def hold_the_gil(_number: int, _frame: object) -> None:
    """Hold the GIL for three seconds, on SIGUSR1: no other thread of this process runs Python."""
    ctypes.PyDLL(None).usleep(3_000_000)
    say("held")


class SlowReader(HTTPTransport[Any]):
    """A transport that sleeps after each chunk of a heal, and after ``hold_at`` bytes waits for ``hold_file``."""

    def __init__(self, seconds_a_chunk: float, hold_at: float, hold_file: Path) -> None:
        super().__init__(timedelta(seconds=30), 0, "127.0.0.1")
        self._seconds_a_chunk, self._hold_at, self._hold_file = seconds_a_chunk, hold_at, hold_file

    def recv_checkpoint(self, *where: Any, progress: Callable[[int, int], None] | None = None, **options: Any) -> Any:
        def slowly(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total)
            time.sleep(self._seconds_a_chunk)  # makes the heal slow: that is what the test asks for
            while done >= self._hold_at and not self._hold_file.exists():
                time.sleep(0.02)  # until the test, another process, lets it continue

        return super().recv_checkpoint(*where, progress=slowly, **options)


def batches_of_workers(count: int, samples: int) -> Iterator[torch.Tensor]:
    """Yield the indices of batches without end, drawn by forked processes."""
    indices: Any = range(samples)  # has all that a map-style dataset needs
    loader: DataLoader[Any] = DataLoader(
        indices, 32, shuffle=True, num_workers=count, persistent_workers=True, multiprocessing_context="fork"
    )
    while True:
        epoch: Any = iter(loader)
        say("workers", pids=[worker.pid for worker in epoch._workers])
        yield from epoch


def main() -> None:
    logging.basicConfig(level=os.environ.get("TRAINER_LOG", "warning").upper())
    signal.signal(signal.SIGUSR1, hold_the_gil)
    torch.set_num_threads(1)
    name = os.environ["REPLICA_GROUP_ID"]
    torch.manual_seed(int.from_bytes(name.encode(), "big") % 1000)  # groups begin apart: only healing makes them equal
    width = int(os.environ.get("TRAINER_WIDTH", "16"))
    layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)]
    if os.environ.get("TRAINER_BATCH_NORM"):
        layers.insert(1, nn.BatchNorm1d(width))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    trouble = Path(os.environ.get("TRAINER_TROUBLE", os.devnull))

    def has_trouble(word: str) -> bool:
        return trouble.exists() and trouble.read_text() == word

    def load(state: dict[str, dict[str, object]]) -> None:
        if has_trouble("heal"):
            raise ValueError("the test lets this heal fail")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    pause_file = Path(os.environ.get("TRAINER_PAUSE_FILE", os.devnull))
    seconds_a_chunk = os.environ.get("TRAINER_CHUNK_SECONDS")
    hold_at = float(os.environ.get("TRAINER_HOLD_HEAL_AT", "inf"))
    kind = ProcessGroupBabyGloo if os.environ.get("TRAINER_BABY") else ProcessGroupGloo
    timeout = timedelta(seconds=float(os.environ.get("TRAINER_TIMEOUT", "30")))
    process_group = kind(timeout=timeout)
    manager = Manager(
        checkpoint_transport=SlowReader(float(seconds_a_chunk), hold_at, pause_file) if seconds_a_chunk else None,
        pg=process_group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=int(os.environ.get("TRAINER_MIN_REPLICAS", "1")),
        use_async_quorum=not os.environ.get("TRAINER_SYNC"),
        timeout=timeout,
        quorum_timeout=timedelta(seconds=60),
    )
    ddp = DistributedDataParallel(manager, model)
    wrapped = Optimizer(
        manager, optimizer, catch_up={"1": True, "0": False}.get(os.environ.get("TRAINER_CATCH_UP", ""))
    )
    say("started", name=name, replica_id=manager.replica_id())
    data = load_digits()
    inputs = torch.tensor(data.data, dtype=torch.float32) / 16
    targets = torch.tensor(data.target)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    steps = int(os.environ.get("TRAINER_STEPS", "0"))
    flip_at = int(os.environ.get("TRAINER_FLIP_AT", "-1"))
    hold_step_at = int(os.environ.get("TRAINER_HOLD_AT", "-1"))
    pauses = {int(step) for step in os.environ.get("TRAINER_PAUSE_AT", "").split(",") if step}
    workers = int(os.environ.get("TRAINER_WORKERS", "0"))
    failures = itertools.count(1)
    drawn = batches_of_workers(workers, len(inputs)) if workers else None
    try:
        while not steps or manager.current_step() < steps:
            wrapped.zero_grad()
            if has_trouble("own"):
                error = ValueError("the test lets this step fail")
                if next(failures) % 2:  # from another place in each step: the same error in a row would end the group
                    manager.report_error(error)
                else:
                    manager.report_error(error)
            if drawn is not None and manager.current_step() > 0:
                batch = next(drawn)
            else:
                batch = torch.randint(len(inputs), (32,), generator=generator)
            loss = nn.functional.cross_entropy(ddp(inputs[batch]), targets[batch])
            if manager.current_step() == hold_step_at and manager.num_participants():
                say("holding", step=hold_step_at)
                while not pause_file.exists():
                    time.sleep(0.02)  # until the test, another process, lets it continue
            torch.autograd.backward(loss)
            manager.record(loss=loss.item())
            if wrapped.step():
                state = digest(model.state_dict(), optimizer.state_dict())
                say(
                    "committed",
                    step=manager.current_step(),
                    digest=state,
                    loss=loss.item(),
                    batches=manager.batches_committed(),
                    quorum_id=manager.state_dict().get("lineage"),
                    child=getattr(process_group, "child_pid", None),
                )
            else:
                followed = manager.catching_up and manager.errored() is None
                say("followed" if followed else "discarded", step=manager.current_step())
            if 0 <= flip_at <= manager.current_step():
                with torch.no_grad():
                    layers[0].get_parameter("weight").view(torch.int32)[1, 2] ^= 1 << 20
                say("flipped", step=manager.current_step())
                flip_at = -1
            time.sleep(PACE)  # the pace that the test asks for
            if (step := manager.current_step()) in pauses:
                pauses.remove(step)
                say("paused", step=step)
                while not pause_file.with_name(f"{pause_file.name}-{step}").exists():
                    time.sleep(0.02)  # until the test, another process, lets it continue
        if os.environ.get("TRAINER_FINISH"):
            end = manager.finish()
            state = digest(model.state_dict(), optimizer.state_dict())
            say("finished", step=end.step, groups=end.groups, digest=state)
    except SystemExit as reason:
        say("left", reason=str(reason), step=manager.current_step())
        raise
    finally:
        manager.shutdown()
    say("left", reason="done", step=manager.current_step())


if __name__ == "__main__":
    main()
