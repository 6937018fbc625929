"""Parts that the scripts of this folder share. Each script runs as plain torch, under torch's DDP, and with keepstep.

A script creates its job, puts all that training changes into ``job.state``, wraps model and optimizer, and trains as
the README says. Only what this module does differs between the three runs::

    job = start()
    job.state = {"model": model, "adamw": adamw}
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.current_step() < 10:
        x, y = job.batch()
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        job.record(loss)
    job.finish()

Environment variables:

HABIT_RUN       plain, ddp, or keepstep
HABIT_RESULT    folder of this run, for losses, the final state, and what the script expects
HABIT_VICTIM    keepstep: number of the group that is killed
HABIT_ALONE     keepstep: 1: the group that is left trains on alone
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

GROUPS = 2
RUN, RESULT = os.environ["HABIT_RUN"], Path(os.environ["HABIT_RESULT"])
ALONE = os.environ.get("HABIT_ALONE", "") != ""
LONG_STEP_SECONDS = 0.2
"""Length of a step with ``ALONE``, so that the killed group is back before the last one."""
KILL_AT = 4
"""Number of committed steps of the job when the group dies, in the middle of the next one."""


def start(
    *,
    plain: dict[str, str] | None = None,
    ddp: dict[str, str] | None = None,
    tolerance: float = 1e-5,
    warns: tuple[str, ...] = (),
    refused: str = "",
    kill_at: int = KILL_AT,
    **options: Any,
) -> Job:
    """Return the job of this process.

    Args:
        plain: values of the final state that differ between plain torch and DDP, by a part of their name, with the
            reason. An empty name means all.
        ddp: the same between DDP and keepstep, which are equal in each bit otherwise.
        tolerance: largest difference between plain torch and DDP, relative or absolute.
        warns: warnings of keepstep that the script deserves.
        refused: a part of the sentence with which keepstep refuses the script; empty: it trains it.
        kill_at: committed steps at the kill.
        **options: of the Manager.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    RESULT.mkdir(parents=True, exist_ok=True)
    expected = {"plain": plain or {}, "ddp": ddp or {}, "tolerance": tolerance, "warns": warns, "refused": refused}
    (RESULT / "expected.json").write_text(json.dumps(expected))
    kinds: dict[str, Callable[[], Job]] = {"plain": Job, "ddp": Ddp, "keepstep": lambda: Keepstep(kill_at, options)}
    job = kinds[RUN]()
    torch.manual_seed(job.group)  # the first weights differ until DDP or keepstep makes them equal
    return job


class Job:
    """Plain torch in one process, on the whole batch."""

    groups = 1
    group = 0

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        """All that training changes, by name: with ``state_dict`` and ``load_state_dict``, or dicts of plain values."""
        self._steps = 0

    # ---- data and results

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the samples of this process, of those of the whole batch."""
        return whole.chunk(self.groups)[self.group]

    def batch(self, size: int = 16, features: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of this process in this step; of shape (samples, features) and (samples, 1)."""
        random = torch.Generator().manual_seed(1000 + self.current_step())
        x = torch.randn(size, features, generator=random)
        return self.share(x), self.share(x.sum(1, keepdim=True).sin())

    def record(self, loss: torch.Tensor | float) -> None:
        """Note the loss of the step that has ended."""
        if ALONE:
            time.sleep(LONG_STEP_SECONDS)  # in place of the work of a step
        number = loss.item() if isinstance(loss, torch.Tensor) else loss
        with (RESULT / f"losses-{self.group}.jsonl").open("a") as file:
            file.write(json.dumps([self.current_step(), number]) + "\n")

    def finish(self) -> None:
        """End the training, and write the final state."""
        self._end()
        torch.save(self._state_dict(), RESULT / f"final-{self.group}.pt")

    def _state_dict(self) -> dict[str, Any]:
        return {
            name: part.state_dict() if hasattr(part, "state_dict") else copy.deepcopy(part)
            for name, part in self.state.items()
        }

    def _load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, part in self.state.items():
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(saved[name])
            else:
                part.update(saved[name])

    # ---- training

    def ddp(self, model: nn.Module, **_: Any) -> Any:
        return _Undistributed(model)

    def optimizer(self, optimizer: torch.optim.Optimizer, **_: Any) -> Any:
        return _Stepping(self, optimizer)

    def current_step(self) -> int:
        return self._steps

    def start_quorum(self) -> None:
        """Begin a step, in a loop without the wrapped optimizer."""

    @contextlib.contextmanager
    def committing(self) -> Iterator[bool]:
        """End the step, and change the weights in the block if it counts."""
        yield True
        self._steps += 1

    def average(self, tensor: torch.Tensor) -> None:
        """Average ``tensor`` in place over the processes."""

    def state_of_steps(self) -> dict[str, Any]:
        """Return what a checkpoint of the script's own has of the job."""
        return {"step": self._steps}

    def load_state_of_steps(self, saved: dict[str, Any]) -> None:
        self._steps = saved["step"]

    def _end(self) -> None:
        pass


class _Undistributed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    no_sync = contextlib.nullcontext


class _Stepping:
    """An optimizer that counts its steps, and whose ``step`` says that it stepped, as keepstep's does."""

    def __init__(self, job: Job, inner: torch.optim.Optimizer) -> None:
        self.job, self.optim = job, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optim, name)

    def step(self, *arguments: Any) -> bool:
        self.optim.step(*arguments)
        self.job._steps += 1
        return True


class Ddp(Job):
    """torch's DistributedDataParallel over Gloo."""

    groups = GROUPS
    group = int(os.environ.get("RANK", "0"))

    def __init__(self) -> None:
        super().__init__()
        store = f"file://{RESULT}/store"
        dist.init_process_group("gloo", init_method=store, rank=self.group, world_size=GROUPS)

    def ddp(self, model: nn.Module, **options: Any) -> Any:
        return nn.parallel.DistributedDataParallel(model, **options)

    def average(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        tensor /= GROUPS

    def _end(self) -> None:
        dist.destroy_process_group()


class Keepstep(Job):
    """keepstep, as in the README."""

    groups = GROUPS
    group = int(os.environ.get("REPLICA_GROUP_ID", "0"))

    def __init__(self, kill_at: int, options: dict[str, Any]) -> None:
        from keepstep import Manager, ProcessGroupGloo

        class Dying(ProcessGroupGloo):
            """Kills the process in the middle of a step, once."""

            def allreduce(own, tensors: Any, opts: Any = None) -> Any:  # noqa: N805
                killed = RESULT / "killed"
                if self.manager.current_step() == kill_at and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().allreduce(tensors, opts)

        super().__init__()
        dies = os.environ.get("HABIT_VICTIM") == str(self.group)
        if not ALONE:
            options.setdefault("min_replica_size", GROUPS)  # a step counts with both groups, as with DDP
        self.manager = Manager(
            pg=Dying() if dies else ProcessGroupGloo(),
            state_dict=self._state_dict,
            load_state_dict=self._load_state_dict,
            **options,
        )

    def ddp(self, model: nn.Module, **options: Any) -> Any:
        from keepstep import DistributedDataParallel

        return DistributedDataParallel(self.manager, model, **options)

    def optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        from keepstep import Optimizer

        return Optimizer(self.manager, optimizer, **options)

    def current_step(self) -> int:
        return self.manager.current_step()

    def start_quorum(self) -> None:
        self.manager.start_quorum()

    def committing(self) -> Any:
        return self.manager.committing()

    def average(self, tensor: torch.Tensor) -> None:
        self.manager.allreduce(tensor).wait()

    def state_of_steps(self) -> dict[str, Any]:
        return self.manager.state_dict()

    def load_state_of_steps(self, saved: dict[str, Any]) -> None:
        self.manager.load_state_dict(saved)

    def _end(self) -> None:
        self.manager.finish()
