"""Operations of several collectives on any process group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work

from keepstep.process_group import ProcessGroup
from keepstep.process_group.sequence import Task
from keepstep.process_group.works import CompletedWork, JointWork, StreamWork


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Use ``stream`` in the block, after the work that is queued on the current stream. None: the current stream."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))  # the tensors may still be computed there
    with torch.cuda.stream(stream):
        yield


def compose(process_group: dist.ProcessGroup, task: Task, tensors: list[torch.Tensor]) -> Work:
    """Run an operation of several collectives; see ``ProcessGroup.compose``. A group of torch runs it at once."""
    if isinstance(process_group, ProcessGroup):
        return process_group.compose(task, tensors)

    def begin(operation: str, *args: Any) -> Work:
        work: Work = getattr(process_group, operation)(*args)
        return work

    with torch.no_grad():
        task(begin)
    return CompletedWork(tensors) if tensors[0].is_cpu else StreamWork(tensors)


def reduce_alone(process_group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> Work:
    """Return the work of a reduction in a group of one rank, which leaves ``tensors`` as they are.

    It begins a collective, because a group that is not configured has one rank too, and must raise.
    """
    return JointWork([process_group.allreduce([torch.zeros(1, device=tensors[0].device)])], tensors)
