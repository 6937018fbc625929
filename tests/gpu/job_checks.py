"""Whole jobs: one copy of a model over all ranks, and a warm start of ``keepstep run``."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from keepstep.one_copy import OneCopy
from tests.gpu.check import DIGEST, Check, Result
from tests.gpu.rank import TIMEOUT, Rank
from tests.gpu.training_checks import KILL_AFTER, STEPS_AFTER_HEAL, loss_of, small_model

SCRIPT = """
import os, signal, sys, torch
from keepstep import Manager
from keepstep.runtime.learned_imports import tell_imports
total = torch.ones(1 << 20, device=sys.argv[1]).mul(2).sum().item()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    tell_imports(), tell_imports()  # as a Manager does after its first steps
    print("ready", flush=True)
    while True:
        signal.pause()
print("computed", total, flush=True)
"""


def one_copy(rank: Rank) -> Result:
    """Three ranks hold one model; the last one is killed, starts again, and gets its shard from its keeper."""

    def build(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model(0).to(rank.device)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    job = OneCopy(
        build,
        device_type=rank.device.type,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        lighthouse_addr=rank.lighthouse,
        replica_id=f"g{rank.index}",
        rank=0,
        world_size=1,
    )
    victim, newest, last, gap, goal = rank.index == rank.ranks - 1, 0, time.monotonic(), 0.0, None
    while goal is None or job.step < goal:
        with job.attempt() as (model, _optimizer):
            (loss_of(rank, model) / job.world_size).backward()
            if not job.commit():
                continue
        assert job.step > newest, f"step {job.step} came after step {newest}: a committed step was lost"
        now = time.monotonic()
        newest, gap, last = job.step, max(gap, now - last if newest else 0.0), now
        if victim and rank.life == 0 and job.step >= KILL_AFTER and job.world_size == rank.ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        if victim and rank.life == 1 and rank.told("goal") is None and job.world_size == rank.ranks:
            rank.tell("goal", str(job.step + STEPS_AFTER_HEAL))
        told = rank.told("goal")
        goal = None if told is None else int(told)
    digest = hashlib.sha256()
    with job.attempt() as (model, _optimizer):
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor), "the model is not sharded"
            digest.update(parameter.detach().full_tensor().cpu().numpy().tobytes())
    job.finish()
    return {DIGEST: digest.hexdigest()[:16], "kill to next commit, s": round(gap, 3), "steps": newest}


def warm_start(rank: Rank) -> Result:
    """A rank that was killed starts again in a fork of a process that has done its imports, and uses the device."""
    script = rank.folder / "warm_start.py"
    script.write_text(SCRIPT)
    run = subprocess.Popen(
        [
            *(sys.executable, "-c", "from keepstep_cli.main import main; main()", "run", "--replicas", "1"),
            *("--lighthouse", rank.lighthouse, "--", str(script), str(rank.device)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pid, killed, started, seen = 0, 0.0, "", []
    try:
        assert run.stdout is not None
        for line in run.stdout:  # the deadline of the check limits it
            seen.append(line)
            if (begun := re.match(r"\[r0\] started.*, pid (\d+)", line)) is not None:
                pid, started = int(begun[1]), line.strip()
            if "restarts are warm from now on" in line:
                killed = time.monotonic()
                os.kill(pid, signal.SIGKILL)
            if (result := re.search(r"computed ([\d.]+)", line)) is not None:
                assert started.endswith(", warm"), started
                assert float(result[1]) == 2 << 20, line
                return {"kill to first result, s": round(time.monotonic() - killed, 3)}
    finally:
        run.terminate()
        run.wait(TIMEOUT.total_seconds())
    raise AssertionError("".join(seen[-30:]))


CHECKS = (
    Check(
        "one_copy",
        "Three ranks hold one model; one is killed and gets its shard back, and no committed step is lost.",
        one_copy,
        ranks=3,
        seconds=90.0,
        restarted=frozenset({2}),
        lighthouse=True,
    ),
    Check(
        "warm_start",
        "A killed rank of `keepstep run` starts again in a fork that has done its imports, and uses the device.",
        warm_start,
        ranks=1,
        seconds=90.0,
        lighthouse=True,
    ),
)
