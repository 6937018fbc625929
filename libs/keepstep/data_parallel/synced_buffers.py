"""Make a module's buffers equal over the groups, once a step.

* Running statistics of BatchNorm and its kind are averaged while their module trains, and so are buffers that the user
  names.
* Every other buffer is copied from the first group that takes part, bit for bit: it is sent as integers, to which the
  other groups add zeros. So infinities, NaNs and dtypes that no backend reduces arrive unchanged.

The treatment of a buffer is decided, and tried, when the model is wrapped. It is part of the layout that groups
compare, because every reduction must have the same size in all groups.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from keepstep.manager import Manager

AVERAGED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes that Gloo and NCCL can sum."""
ALIGNMENT = 16
"""In bytes. A buffer's part of the carrier must begin at a multiple of the size of its elements."""


class Treatment(Enum):
    """How a buffer is made equal over the groups."""

    AVERAGED = "averaged"
    COPIED = "copied"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer, as it was when the model was wrapped."""

    name: str
    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    treatment: Treatment

    @property
    def line(self) -> str:
        """Line of the layout."""
        return f"buffer {self.name} {self.shape} {self.dtype} {self.treatment.value}"

    def current(self) -> torch.Tensor:
        """Return the module's tensor. RuntimeError if its shape or dtype has changed since the model was wrapped."""
        tensor = self.owner._buffers.get(self.attribute)  # noqa: SLF001  as torch's own DDP
        if tensor is None or tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            now = "gone" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            raise RuntimeError(
                f"buffer {self.name!r} was {self.shape} {self.dtype} when the model was wrapped and is {now} now. It "
                f"cannot be reduced over the groups: keep its shape and dtype, or name it in ignore_buffers"
            )
        return _distinct(tensor)


class SyncedBuffers:
    """Starts the reductions of a module's buffers. ``should_commit`` writes the results back.

    Args:
        manager: of this replica group.
        module: with the buffers; those that are added later are not synchronized.
        sync: False: all buffers are ignored.
        average: names, or shell patterns of names, of further buffers to average.
        ignore: names, or shell patterns of names, of buffers that are not synchronized.

    Raises:
        ValueError: a name matches no buffer, or a buffer cannot be synchronized.
    """

    def __init__(
        self, manager: Manager, module: nn.Module, *, sync: bool, average: Iterable[str], ignore: Iterable[str]
    ) -> None:
        self._manager = manager
        self._buffers = _buffers(module, sync=sync, average=_patterns(average), ignore=_patterns(ignore))
        for buffer in self._buffers:
            _try(buffer)
        copied = [buffer for buffer in self._buffers if buffer.treatment is Treatment.COPIED and 0 not in buffer.shape]
        self._copied: list[tuple[_Buffer, int, int]] = []
        """Each buffer with its part of the carrier: first byte, and the byte after the last."""
        self._carrier_bytes = 0
        for buffer in copied:
            size = buffer.current().numel() * buffer.dtype.itemsize
            self._copied.append((buffer, self._carrier_bytes, self._carrier_bytes + size))
            self._carrier_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        self._averaged: dict[torch.dtype, list[_Buffer]] = {}
        for buffer in self._buffers:
            if buffer.treatment is Treatment.AVERAGED and 0 not in buffer.shape:
                self._averaged.setdefault(buffer.dtype, []).append(buffer)
        self._device = next((one.device for one in module.parameters() if one.requires_grad), torch.device("cpu"))
        """Device of the gradients, and so of tensors that the process group can reduce."""

    @property
    def lines(self) -> list[str]:
        """Lines of the layout, one for each buffer."""
        return [buffer.line for buffer in self._buffers]

    def start(self) -> None:
        """Start the reductions. Once a step, after the forward pass. RuntimeError if a buffer has changed its shape."""
        if not self._copied and not self._averaged:
            return
        try:
            self._place()
        except (Exception, SystemExit) as error:  # noqa: BLE001  no quorum: the all-reduce reports the reason
            self._manager.report_error(RuntimeError(f"no quorum: {error}"))
            return
        try:
            with torch.no_grad():
                for buffers in self._averaged.values():
                    self._average(buffers)
                if self._copied:
                    self._copy()
        except RuntimeError as error:
            self._manager.report_error(error)
            raise

    def _place(self) -> tuple[bool, int]:
        """Return whether this group is the first of those that take part, and their number."""
        rank, groups = self._manager.steps.participation()
        return rank == 0, groups

    def _average(self, buffers: list[_Buffer]) -> None:
        """Average the buffers: divide, then sum.

        The statistics of a module that does not train are copied from the first group, because an average of equal
        values would change them by a rounding error in every step.
        """
        tensors = [buffer.current() for buffer in buffers]

        def shares() -> torch.Tensor:
            first, world = self._place()
            parts = []
            for buffer, tensor in zip(buffers, tensors, strict=True):
                flat = tensor.reshape(-1).to(self._device)
                parts.append(flat / world if buffer.owner.training else flat if first else torch.zeros_like(flat))
            return torch.cat(parts)

        carrier = shares()
        pieces = torch.split(carrier, [tensor.numel() for tensor in tensors])

        @torch.no_grad()
        def refill() -> None:
            carrier.copy_(shares())

        self._reduce(carrier, list(zip(tensors, pieces, strict=True)), refill)

    def _copy(self) -> None:
        carrier = torch.zeros(self._carrier_bytes, dtype=torch.uint8, device=self._device)
        parts = [(buffer.current(), carrier[begin:end]) for buffer, begin, end in self._copied]

        @torch.no_grad()
        def fill() -> None:
            carrier.zero_()
            if self._place()[0]:
                for tensor, piece in parts:
                    piece.copy_(_bytes_of(tensor))

        fill()
        targets = [(tensor, piece.view(tensor.dtype)) for tensor, piece in parts]
        self._reduce(carrier.view(torch.int64), targets, fill)  # eight bytes at once; a sum with zeros has no carry

    def _reduce(
        self,
        carrier: torch.Tensor,
        targets: Sequence[tuple[torch.Tensor, torch.Tensor]],
        refill: Callable[[], None],
    ) -> None:
        write_back = partial(_write_back, targets)
        self._manager.allreduce(carrier, reduce_op=ReduceOp.SUM, write_back=write_back, refill=refill)


@torch.no_grad()
def _write_back(targets: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, piece in targets:
        tensor.copy_(piece.view(tensor.shape))


def _buffers(module: nn.Module, *, sync: bool, average: list[str], ignore: list[str]) -> list[_Buffer]:
    """Return each buffer of the module once, with its treatment. ValueError for names that match no buffer."""
    found: list[_Buffer] = []
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for attribute, tensor in owner._buffers.items():  # noqa: SLF001  as torch's own DDP
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = f"{path}.{attribute}" if path else attribute
            averaged, ignored = _matches(name, average), _matches(name, ignore)
            if averaged and ignored:
                raise ValueError(
                    f"buffer {name!r} is named in both average_buffers and ignore_buffers; name it in one of them"
                )
            if not sync or ignored:
                treatment = Treatment.IGNORED
            elif averaged or _is_running_statistic(owner, attribute):
                treatment = Treatment.AVERAGED
            else:
                treatment = Treatment.COPIED
            found.append(_Buffer(name, owner, attribute, tuple(tensor.shape), tensor.dtype, treatment))
    for argument, patterns in (("average_buffers", average), ("ignore_buffers", ignore)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(buffer.name, pattern) for buffer in found):
                names = ", ".join(buffer.name for buffer in found) or "none"
                raise ValueError(f"{argument}: {pattern!r} matches no buffer; the model's buffers: {names}")
    return found


def _is_running_statistic(owner: nn.Module, attribute: str) -> bool:
    return isinstance(owner, _NormBase) and owner.track_running_stats and attribute in ("running_mean", "running_var")


def _patterns(names: Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _try(buffer: _Buffer) -> None:
    """Try the operations of a step on ``buffer``. ValueError if one of them fails."""
    if buffer.treatment is Treatment.IGNORED:
        return
    if buffer.treatment is Treatment.AVERAGED and buffer.dtype not in AVERAGED_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in AVERAGED_DTYPES)
        raise ValueError(f"buffer {buffer.name!r} cannot be averaged: it is {buffer.dtype}, expected one of {known}")
    tensor: Any = buffer.owner._buffers[buffer.attribute]  # noqa: SLF001
    problem = ""
    if is_traceable_wrapper_subclass(tensor):
        problem = f"a {type(tensor).__name__}"
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        problem = f"layout {tensor.layout}, device {tensor.device}{', quantized' if tensor.is_quantized else ''}"
    else:
        try:
            values = buffer.current()
            with torch.no_grad():
                if values.numel():
                    values.copy_(_bytes_of(values).clone().view(buffer.dtype).view(values.shape))
        except (RuntimeError, NotImplementedError, TypeError) as error:  # torch, for a dtype that it cannot copy
            problem = str(error).partition("\n")[0]
    if problem:
        raise ValueError(
            f"buffer {buffer.name!r} ({buffer.shape} {buffer.dtype}) cannot be synchronized: {problem}; "
            f"name it in ignore_buffers if it may differ between the groups"
        )


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without repeated dimensions (``expand``), which cannot be written."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in order, as a flat tensor of uint8."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
