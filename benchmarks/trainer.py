"""Train a small network on one replica group of one rank, for other benchmarks.

``kill_to_commit.py``, ``step_cost.py``, and ``heal_step.py`` start it. All libraries share the loop: ``--library
keepstep`` and ``--library torchft`` differ only in the imported module. ``--library plain`` is torch's own
DistributedDataParallel, for the cost of a step without either.

Each committed step writes one line: Unix time, step, number of participants, seconds since the step began.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TextIO

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, IterableDataset

LOOPBACK = "127.0.0.1"
INTERFACE = "eth0"
"""Of a host in a network namespace."""
FEATURES = 1024
BATCH = 32
DIGEST_EVERY = 2
"""Steps between two lines of ``--digests``."""


def network(size: str) -> nn.Module:
    """``tiny``: 110 parameters. ``medium``: 2.1 million. ``large``: 8.4 million, 32 MiB."""
    torch.manual_seed(0)
    if size == "tiny":
        return nn.Linear(10, 10)
    wide = 4 * FEATURES if size == "large" else FEATURES
    return nn.Sequential(nn.Linear(FEATURES, wide), nn.ReLU(), nn.Linear(wide, FEATURES))


def batch(size: str) -> torch.Tensor:
    return torch.randn(BATCH, 10 if size == "tiny" else FEATURES)


class Batches(IterableDataset[torch.Tensor]):
    """Repeat one batch."""

    def __init__(self, size: str) -> None:
        self._batch = batch(size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self._batch


def batches(options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield batches of ``--workers`` forked processes, or of this process without them."""
    return iter(DataLoader(Batches(options.model), batch_size=None, num_workers=options.workers))


def more_state(mebibytes: int) -> list[torch.Tensor]:
    """Return tensors of 4 MiB for the state; a step changes only the first element of each."""
    return [torch.full((1 << 20,), float(number)) for number in range(mebibytes // 4)]


def train_fault_tolerant(options: argparse.Namespace, ballast: list[torch.Tensor], out: TextIO) -> None:
    library = importlib.import_module(options.library)
    process_group = importlib.import_module(f"{options.library}.process_group")

    model = network(options.model)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    timeout = timedelta(seconds=options.timeout)

    def load_state_dict(state: dict[str, object]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        for mine, received in zip(ballast, state["ballast"], strict=True):
            if mine is not received:
                mine.copy_(received)

    def state_dict() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict(), "ballast": ballast}

    manager = library.Manager(
        pg=process_group.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=options.min_replicas,
        timeout=timeout,
        replica_id=f"group_{options.group}",
        hostname=options.address,
    )
    replicated = library.DistributedDataParallel(manager, model)

    def change_more() -> None:
        if ballast:
            torch._foreach_add_([tensor[:1] for tensor in ballast], 1.0)

    ways: dict[str, object] = {}
    if options.catch_up:
        ways = {"after_commit": [change_more]}
    elif options.library == "keepstep":
        ways = {"catch_up": False}
    optimizer = library.Optimizer(manager, inner, **ways)
    data = batches(options)
    if options.rehearse:
        with manager.rehearse():
            optimizer.zero_grad()
            replicated(next(data)).square().mean().backward()
            optimizer.step()
    while manager.current_step() < options.steps:
        inputs = next(data)
        step, began = manager.current_step(), time.perf_counter()
        optimizer.zero_grad()
        replicated(inputs).square().mean().backward()
        optimizer.step()
        if manager.current_step() > step and not (options.catch_up and manager.catching_up):
            note(out, manager.current_step(), manager.num_participants(), time.perf_counter() - began)
            if not options.catch_up:
                change_more()
            if options.digests and manager.current_step() % DIGEST_EVERY == 0:
                with open(options.digests, "a", encoding="ascii") as digests:  # noqa: PTH123
                    digests.write(f"{manager.current_step()} {digest([*model.parameters(), *ballast])}\n")
        if options.pause:
            time.sleep(options.pause)  # in place of loading data
    manager.shutdown()


@torch.no_grad()
def digest(tensors: list[torch.Tensor]) -> int:
    """Sum the bits of all elements, as integers."""
    return sum(int(one.view(torch.int32).sum(dtype=torch.int64)) for one in tensors)


def train_plain(options: argparse.Namespace, out: TextIO) -> None:
    torch.distributed.init_process_group(
        "gloo", rank=options.group, world_size=options.groups, init_method=f"tcp://127.0.0.1:{options.store_port}"
    )
    model = network(options.model)
    replicated = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = batch(options.model)
    for step in range(options.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        replicated(inputs).square().mean().backward()
        optimizer.step()
        note(out, step + 1, options.groups, time.perf_counter() - began)
    torch.distributed.destroy_process_group()
    out.close()
    os._exit(0)  # torch sometimes aborts while its threads are torn down


def note(out: TextIO, step: int, participants: int, seconds: float) -> None:
    out.write(f"{time.time():.6f} {step} {participants} {seconds:.9f}\n")
    out.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=("plain", "torchft", "keepstep"), required=True)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--model", choices=("tiny", "medium", "large"), default="tiny")
    parser.add_argument("--catch-up", action="store_true", help="join as by default; without it, heal; keepstep only")
    parser.add_argument("--rehearse", action="store_true", help="run a step before the first one; keepstep only")
    parser.add_argument("--digests", default="", help="file for the sum of the weights' bits, now and then")
    parser.add_argument("--address", default=LOOPBACK, help="of this host")
    parser.add_argument("--ballast-mib", type=int, default=0, help="state beside the network")
    parser.add_argument("--steps", type=int, default=sys.maxsize)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of loading data, between steps")
    parser.add_argument("--workers", type=int, default=0, help="forked processes of a DataLoader, 0: none")
    parser.add_argument("--timeout", type=float, default=60.0, help="of collectives and votes, in seconds")
    parser.add_argument("--store-port", type=int, default=0)
    parser.add_argument("--on-cue", action="store_true", help="import everything, then wait for a line on stdin")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)

    if options.library == "torchft" and options.address != LOOPBACK:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE  # it binds to the address of the host's name, and advertises that
        socket.gethostname = lambda: options.address
    importlib.import_module("torch._dynamo")  # torch does it when the first DistributedDataParallel is made
    if options.library != "plain":
        library = importlib.import_module(options.library)
        importlib.import_module(f"{options.library}.process_group").ProcessGroupGloo  # noqa: B018 - it comes when asked
        library.Manager, library.Optimizer, library.DistributedDataParallel  # noqa: B018
    ballast = more_state(options.ballast_mib)
    if options.on_cue:
        print("ready", flush=True)
        sys.stdin.readline()
    with open(options.out, "w", encoding="ascii") as out:  # noqa: PTH123
        if options.library == "plain":
            train_plain(options, out)
            return
        # torchrun's environment of every rank.
        store = TCPStore(options.address, 0, is_master=True, wait_for_workers=False)
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR=options.address, MASTER_PORT=str(store.port))
        os.environ["TORCHFT_LIGHTHOUSE"] = options.lighthouse
        train_fault_tolerant(options, ballast, out)


if __name__ == "__main__":
    main()
