"""The arguments of a collective as a message, with its tensors in shared memory or as CUDA IPC handles.

Tensors of other accelerators go through shared memory, and the child process copies them to its device.

A message names tensors by place, type and shape; nothing is pickled. A CUDA IPC handle is torch's tuple of numbers and
bytes: the exporting process must keep the tensor until the other process has released it.

The first argument of every operation has the tensors that the operation writes, except for ``send``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from keepstep.process_group.baby.shared_memory import Segment, aligned

_READS_FIRST = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "send"})
"""Operations that read the tensors of their first argument."""
_OPTIONS: dict[str, type[Any]] = {
    name: getattr(c10d, name)
    for name in (
        "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "AllToAllOptions", "BarrierOptions",
        "BroadcastOptions", "ReduceScatterOptions",
    )
}  # fmt: skip
_REDUCE_OPS = {
    name: getattr(dist.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}  # fmt: skip
_REDUCE_NAMES = {int(value): name for name, value in _REDUCE_OPS.items()}


class PackedCall:
    """A collective that is ready to be sent.

    Args:
        operation: method of torch's backends.
        args: its arguments.
        take_segment: gives shared memory of at least so many bytes.

    Raises:
        TypeError: an argument or a tensor of a kind that cannot go to a child process.
    """

    def __init__(self, operation: str, args: tuple[Any, ...], take_segment: Callable[[int], Segment]) -> None:
        self.segment: Segment | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._keep: list[torch.Tensor] = []
        size = sum(aligned(tensor.nbytes) for tensor in _tensors(args) if not _can_export(tensor))
        if size:
            self.segment = take_segment(size)
        self._offset = 0
        encoded = [
            self._encode(arg, reads=position > 0 or operation in _READS_FIRST, writes=position == 0)
            for position, arg in enumerate(args)
        ]
        self.message = {"operation": operation, "args": encoded, "segment": self.segment and self.segment.id}
        if operation == "send":
            self._copies = []

    def copy_results(self) -> None:
        """Copy what the operation has written from shared memory into the caller's tensors."""
        for tensor, shared in self._copies:
            tensor.copy_(shared)

    def _encode(self, arg: Any, *, reads: bool, writes: bool) -> Any:
        if isinstance(arg, torch.Tensor):
            return {"tensor": self._place(arg, reads=reads, writes=writes)}
        if isinstance(arg, list | tuple):
            return [self._encode(one, reads=reads, writes=writes) for one in arg]
        if isinstance(arg, int):
            return arg
        return {"options": _options_to_message(arg)}

    def _place(self, tensor: torch.Tensor, *, reads: bool, writes: bool) -> dict[str, Any]:
        described: dict[str, Any] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if _can_export(tensor):
            self._keep.append(tensor)
            return described | {"handle": _export(tensor)}
        described |= {"offset": self._offset, "device": str(tensor.device), "writes": writes}
        if self.segment is not None:
            shared = self.segment.tensor(self._offset, tensor.dtype, tensor.shape)
            if reads:
                shared.copy_(tensor)
            if writes:
                self._copies.append((tensor, shared))
            self._offset += aligned(tensor.nbytes)
        return described


class UnpackedCall:
    """A collective in the child process. ``args``: its arguments, with tensors in ``segment`` or on the device."""

    def __init__(self, message: dict[str, Any], segment: Segment | None) -> None:
        self._segment = segment
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.operation = str(message["operation"])
        self.args = tuple(self._decode(arg) for arg in message["args"])

    def copy_results(self) -> None:
        """Copy what the operation has written on a device without IPC to the shared memory."""
        for tensor, shared in self._copies:
            shared.copy_(tensor)

    def _decode(self, arg: Any) -> Any:
        match arg:
            case {"tensor": place}:
                return self._tensor(place)
            case {"options": options}:
                return _options_from_message(options)
            case list():
                return [self._decode(one) for one in arg]
            case int():
                return arg
            case _:
                raise TypeError(f"invalid argument in a message: {arg!r}")

    def _tensor(self, place: dict[str, Any]) -> torch.Tensor:
        dtype = getattr(torch, place["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"invalid type of a tensor in a message: {place['dtype']!r}")
        if "handle" in place:
            return _attach(place["handle"], dtype, place["shape"])
        if self._segment is None:
            return torch.empty(place["shape"], dtype=dtype, device=place["device"])
        shared = self._segment.tensor(place["offset"], dtype, place["shape"])
        if place["device"] == "cpu":
            return shared
        tensor = shared.to(place["device"])
        if place["writes"]:
            self._copies.append((tensor, shared))
        return tensor


def _can_export(tensor: torch.Tensor) -> bool:
    """Return whether another process can map the tensor's device memory."""
    return tensor.device.type == "cuda"


def _export(tensor: torch.Tensor) -> list[Any]:
    """Return a handle of the tensor's memory, after the work that the current stream has for it."""
    torch.cuda.current_stream(tensor.device).synchronize()  # the child's stream does not follow this one
    storage: Any = tensor.untyped_storage()
    return [list(storage._share_cuda_()), tensor.storage_offset(), list(tensor.stride())]


def _attach(handle: Sequence[Any], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the memory of a handle as a tensor of this process."""
    shared, offset, stride = handle
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = cast("Any", torch.UntypedStorage)._new_shared_cuda(*shared)  # noqa: SLF001  no public name
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, tuple(shape), tuple(stride))


def _tensors(arg: Any) -> Iterator[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        if arg.layout != torch.strided:
            raise TypeError(f"a tensor of layout {arg.layout} cannot go to a child process; use a dense tensor")
        yield arg
    elif isinstance(arg, list | tuple):
        for one in arg:
            yield from _tensors(one)


def _options_to_message(options: Any) -> dict[str, Any]:
    kind = type(options).__name__
    if kind not in _OPTIONS:
        raise TypeError(f"invalid argument of type {kind}: a child process takes tensors, integers and torch's options")
    message: dict[str, Any] = {"kind": kind, "timeout": options.timeout.total_seconds()}
    if hasattr(options, "reduceOp"):
        number = int(getattr(options.reduceOp, "op", options.reduceOp))
        if number not in _REDUCE_NAMES:
            raise TypeError(f"{options.reduceOp} cannot go to a child process; use one of {', '.join(_REDUCE_OPS)}")
        message["reduce_op"] = _REDUCE_NAMES[number]
    if hasattr(options, "rootRank"):
        message["root"] = [options.rootRank, options.rootTensor]
    return message


def _options_from_message(message: dict[str, Any]) -> Any:
    options = _OPTIONS[message["kind"]]()
    options.timeout = timedelta(seconds=message["timeout"])
    if "reduce_op" in message:
        options.reduceOp = _REDUCE_OPS[message["reduce_op"]]
    if "root" in message:
        options.rootRank, options.rootTensor = message["root"]
    return options


def timeout_of(args: tuple[Any, ...]) -> timedelta | None:
    """Return the limit that the options of a collective set; None if they set none."""
    limits = [one.timeout for one in args if type(one).__name__ in _OPTIONS]
    return next((limit for limit in limits if limit > timedelta(0)), None)
