"""Measure durable checkpoints beside torch.distributed.checkpoint and torch_checkpointing, in one run.

A state of 1 GiB on one rank, and on two that hold half of each tensor. All libraries write to the same file system.
keepstep and dcp sync their files. torch_checkpointing does not: saves of keepstep without a sync are beside it.
keepstep also verifies every chunk that it loads. Of loads and background saves, ``theirs`` is the better peer.

python benchmarks/run.py checkpoint
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from figures import Figure, Limit, p50
from sides import HERE, WORK, Side, free_port, relay, stop

GIB = 1 << 30
TENSORS = 256
TENSORS_OF_QUARTER = 16
"""A shard of a tensor has several chunks then."""
ROUNDS = 2
RUN_TIMEOUT = 300.0
"""Of one library on one number of ranks."""
PEERS = ("dcp", "torch_checkpointing")
RANKS_OF_PLAN = 1000
TENSORS_OF_PLAN = 10_000
PLAN_SECONDS = 1.0
QUARTER = 0.25
QUARTER_OVERHEAD = 0.05


def measure(side: Side, library: str, place: str, log: Path, *, ranks: int, **flags: int | bool) -> dict[str, Any]:
    """Return what rank 0 of ``checkpoint_ends.py`` prints."""
    command = [side.python, HERE / "checkpoint_ends.py", library, "--place", place, "--ranks", str(ranks)]
    command += ["--store-port", str(free_port())]
    for flag, value in flags.items():
        command += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("ab"))
        processes = []
        for rank in range(ranks):
            process = subprocess.Popen(
                [*map(str, command), "--rank", str(rank)],
                env=side.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            stack.callback(stop, process)
            processes.append(process)
        told = [process.communicate(timeout=RUN_TIMEOUT)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError(f"a rank of {library} failed; see {log}")
    answer: dict[str, Any] = json.loads(told[0].splitlines()[-1])
    return answer


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    size, rounds = (GIB // 4, 1) if quick else (GIB, ROUNDS)
    figures = []
    with tempfile.TemporaryDirectory(dir=WORK) as folder, contextlib.ExitStack() as stack:
        flags = ("--memory", "8GiB", "--data-dir", f"{folder}/relay", "--keep-durable", "1")
        at_relay = f"{stack.enter_context(relay(ours, log, *flags)).address}/v1/jobs/bench/checkpoints/"
        for ranks in (1, 2):
            seconds: dict[str, dict[str, list[float]]] = {}
            for name, side, library, place in (
                ("keepstep", ours, "keepstep", f"{folder}/keepstep"),
                ("unsynced", ours, "keepstep_unsynced", f"{folder}/unsynced"),
                ("relay", ours, "keepstep", f"{at_relay}of-{ranks}"),
                ("dcp", theirs, "dcp", f"{folder}/dcp"),
                ("torch_checkpointing", theirs, "torch_checkpointing", f"{folder}/meta"),
            ):
                print(f"checkpoint of {size >> 20} MiB on {ranks} ranks: {name} ...", flush=True)
                seconds[name] = measure(
                    side, library, place, log, ranks=ranks, size=size, tensors=TENSORS, rounds=rounds
                )
            figures += _speed(seconds, size, ranks)
        figures.append(_quarter(ours, theirs, folder, log, size))
    return [*figures, _plan(ours, log)]


def _speed(seconds: dict[str, dict[str, list[float]]], size: int, ranks: int) -> list[Figure]:
    def rates(name: str, what: str) -> list[float]:
        return [size / 1e9 / one for one in seconds[name][what]]

    where = f"{size >> 20} MiB on {ranks} rank{'s' if ranks > 1 else ''}"
    figures = []

    def beside(what: str, mine: str, peer: str, title: str, definition: str) -> Figure:
        return Figure(
            f"{what} of {where}{title}",
            "GB/s",
            "p50",
            rates(mine, what),
            rates(peer, what),
            Limit(times_theirs=1.0),
            more_is_better=True,
            beside=peer,
            definition=f"{definition}; the slowest rank",
            also={"gb_per_second_of_each": {name: p50(rates(name, what)) for name in seconds}},
        )

    fastest = max(PEERS, key=lambda name: p50(rates(name, "load")))
    figures.append(beside("save", "keepstep", "dcp", "", "to a directory, files synced"))
    figures.append(beside("save", "unsynced", "torch_checkpointing", ", not synced", "to a directory"))
    figures.append(beside("load", "keepstep", fastest, "", "from a directory, in the cache of the kernel"))
    figures += [
        Figure(f"{what} of {where}, through a relay", "GB/s", "p50", rates("relay", what), more_is_better=True)
        for what in ("save", "load")
    ]
    blocked = {name: [1e3 * one for one in seconds[name]["blocked"]] for name in seconds}
    best = min(PEERS, key=lambda name: p50(blocked[name]))
    figures.append(
        Figure(
            f"training blocked by a background save of {where}",
            "ms",
            "p50",
            blocked["keepstep"],
            blocked[best],
            Limit(times_theirs=1.0),
            beside=best,
            definition="until the state may change; the slowest rank",
            also={"ms_of_each": {name: p50(samples) for name, samples in blocked.items()}},
        )
    )
    return figures


def _quarter(ours: Side, theirs: Side, folder: str, log: Path, size: int) -> Figure:
    shares = defaultdict(list)
    with relay(ours, log, "--memory", "8GiB", "--memory-checkpoints", "1") as server:
        for name, side, place in (
            ("keepstep", ours, f"{server.address}/v1/jobs/bench/checkpoints/quarter"),
            ("dcp", theirs, f"{folder}/quarter"),
        ):
            told = measure(side, name, place, log, ranks=1, size=size, tensors=TENSORS_OF_QUARTER, quarter=True)
            shares[name] += told["share"]
    return Figure(
        "bytes read for a quarter of each shard",
        "of all",
        "p50",
        shares["keepstep"],
        shares["dcp"],
        Limit(value=QUARTER + QUARTER_OVERHEAD),
        beside="dcp",
        definition=f"through a relay, of tensors of {size // TENSORS_OF_QUARTER >> 20} MiB; dcp: from files",
    )


def _plan(ours: Side, log: Path) -> Figure:
    """Time what each rank computes for a save on 1,000 ranks with FSDP."""
    script = f"""
import time, json
from keepstep.state.local_parts import Mesh, TensorPart
from keepstep.checkpoint.planning import RankLayout, plan
import torch
ranks = {RANKS_OF_PLAN}
mesh = Mesh(tuple(range(ranks)), (ranks,), ("S(0)",))
parts = {{
    f"model.layers.{{i}}.weight": TensorPart((f"layer{{i}}",), torch.float32, (ranks * 8, 16), (), mesh, True)
    for i in range({TENSORS_OF_PLAN})
}}
times = []
for _ in range(5):
    began = time.perf_counter()
    packed = RankLayout.of(parts, {{}}).pack()
    found = plan([RankLayout.unpack(packed)], [0] * ranks)
    mine = [found.writes(5, key, part) for key, part in parts.items()]
    times.append(time.perf_counter() - began)
    assert len([one for one in mine if one is not None]) == len(parts)
print(json.dumps(times))
"""
    with log.open("ab") as errors:
        told = subprocess.run(
            [ours.python, "-c", script],
            env=ours.environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            check=True,
            timeout=RUN_TIMEOUT,
        )
    return Figure(
        f"plan of {TENSORS_OF_PLAN} sharded tensors on {RANKS_OF_PLAN} ranks",
        "s",
        "p50",
        json.loads(told.stdout),
        limit=Limit(value=PLAN_SECONDS),
        definition="processor time of each rank: describe, read the layout of all, decide",
    )
