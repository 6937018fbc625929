"""Agreement of the ranks of one save or load: each stage succeeds on all of them, or raises on all of them.

The ranks are those of the default process group of torch.distributed. Without one, this process is the only rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from traceback import extract_tb
from typing import Any, Self

import msgpack
import torch
import torch.distributed as dist

from keepstep.connection.deadline import Deadline
from keepstep_megatron.core import CheckpointingException

TIMEOUT = timedelta(minutes=10)
MAX_STAGE_BYTES = 1 << 30
"""Result of one rank in one stage. All ranks receive those of all."""


class StageFailed(CheckpointingException):
    """A rank failed, or was lost. Every rank that is alive raises it.

    Each of them is a ``torch.distributed.checkpoint.CheckpointException`` too, which is what scripts for Megatron Core
    catch. It has ``failures``: the errors by rank.
    """

    def __new__(cls, *args: Any) -> Self:
        """Return an instance of a class that is one of torch's errors too."""
        made: Self = super().__new__(_also_of_torch(cls), *args)  # type: ignore[arg-type]
        return made

    def __init__(self, message: str, failures: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self._failures = {rank: (one, extract_tb(one.__traceback__)) for rank, one in (failures or {}).items()}

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return StageFailed, self.args[:1]


@cache
def _also_of_torch(kind: Any) -> Any:
    from torch.distributed.checkpoint import CheckpointException  # noqa: PLC0415  slow import

    if issubclass(kind, CheckpointException):
        return kind
    return type(kind.__name__, (kind, CheckpointException), {"__doc__": kind.__doc__, "__module__": kind.__module__})


class Ranks:
    """The ranks that save or load together.

    Args:
        what: begins the errors, such as ``"/checkpoints/8 was not saved"``.
        timeout: time limit of all exchanges together.
        group: the process group. Default: that of ``torch.distributed`` if initialized.
        alone: take this process for the only rank.
    """

    def __init__(
        self, what: str, timeout: timedelta = TIMEOUT, *, group: dist.ProcessGroup | None = None, alone: bool = False
    ) -> None:
        self._what = what
        self._deadline = Deadline(timeout.total_seconds(), what)
        self._group = group
        self._is_group = not alone and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self._is_group else 0
        self.size = dist.get_world_size(group) if self._is_group else 1

    def stage(self, work: Callable[[], bytes | None]) -> list[bytes]:
        """Call ``work`` on every rank, and return the results of all ranks.

        Raises:
            StageFailed: ``work`` failed on a rank, or a rank was lost. The rank that failed has its error as the cause.
                With ``group``, a ``CheckpointingException``, which a stage of all ranks can tell the others.
        """
        problem: BaseException | None = None
        mine = b""
        try:
            mine = work() or b""
            if len(mine) > MAX_STAGE_BYTES:
                raise CheckpointingException(
                    f"this rank has {len(mine)} bytes for the other ranks (limit {MAX_STAGE_BYTES}): describe its "
                    f"state by fewer tensors and objects"
                )
        except StageFailed:  # every rank has it
            raise
        except BaseException as error:  # noqa: BLE001  raised below; the other ranks must not wait
            problem = error
        try:
            found = self._gather(msgpack.packb([None if problem is None else _described(problem), mine]))
        except CheckpointingException:
            if problem is None:
                raise
            found = []
        if problem is not None:
            if not isinstance(problem, Exception):
                raise problem
            raise self._failed(f"{self._what}: {_described(problem)}", {self.rank: problem}) from problem
        results = [msgpack.unpackb(one) for one in found]
        for rank, (failure, _) in enumerate(results):
            if failure is not None:
                raise self._failed(f"{self._what}: rank {rank} failed: {failure}", {rank: RuntimeError(failure)})
        return [result for _, result in results]

    def gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks. Raises ``StageFailed`` if a rank was lost."""
        return self.stage(lambda: mine)

    @property
    def device(self) -> torch.device:
        """A device whose tensors the group exchanges: the CPU if it can."""
        return _device_of(self._group)

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks.

        Args:
            mine: on ``device``; of the same shape and dtype on all ranks.

        Raises:
            StageFailed: a rank was lost.
        """
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(found, mine, group=self._group, async_op=True))
        return found

    def broadcast(
        self, mine: torch.Tensor | None, source: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Send a tensor from one rank to all of them.

        Args:
            mine: the tensor, at the rank that sends it.
            source: that rank, in the group.
            shape: of the tensor.
            dtype: of the tensor.

        Returns:
            The tensor; at the other ranks, a new one.

        Raises:
            StageFailed: a rank was lost.
        """
        device = self.device
        tensor = torch.empty(shape, dtype=dtype, device=device) if mine is None else mine.detach().to(device)
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)  # groups do not send every dtype
        self._wait(lambda: dist.broadcast(flat, group=self._group, async_op=True, group_src=source))
        return tensor if mine is None else mine

    def _gather(self, mine: bytes) -> list[bytes]:
        if self.size == 1:
            return [mine]
        device = self.device
        sizes = self.all_gather(torch.tensor([len(mine)], dtype=torch.int64, device=device))
        lengths = [int(one.item()) for one in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        found = self.all_gather(padded)
        return [one[:length].cpu().numpy().tobytes() for one, length in zip(found, lengths, strict=True)]

    def _wait(self, begin: Callable[[], dist.Work | None]) -> None:
        try:
            work = begin()
            assert work is not None
            work.wait(timedelta(seconds=self._deadline.remaining()))
        except (RuntimeError, TimeoutError) as error:  # torch has no narrower error for a lost rank
            raise self._failed(f"{self._what}: a rank was lost: {str(error).splitlines()[0]}", {}) from error

    def _failed(self, message: str, failures: Mapping[int, BaseException]) -> CheckpointingException:
        if self._group is None:
            return StageFailed(message, failures)
        return CheckpointingException(message)  # ranks outside of the group do not know


def _described(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  the other ranks wait for the text
        text = "its text cannot be shown"
    text = text.encode(errors="backslashreplace").decode()
    return text if isinstance(error, CheckpointingException) else f"{type(error).__name__}: {text}"


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group exchanges: the CPU if it can."""
    config = str(dist.get_backend_config(group))
    accelerator = torch.accelerator.current_accelerator()
    if "gloo" in config or "mpi" in config or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
