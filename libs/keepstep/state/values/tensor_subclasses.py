"""Tensors that wrap other tensors, such as the quantized optimizer states of torchao.

They are stored as what they wrap. No operation runs on the wrapper itself: its address is 0, its ``detach`` may lose
the dtype, and its ``copy_`` may leave out a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from keepstep.state.errors import StateMismatch, UnsupportedValue
from keepstep.state.values.known_classes import class_name
from keepstep.state.values.sharding import is_dtensor, is_sharded_tensor

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Classes whose tensors have memory of their own, and nothing else."""


@dataclass(frozen=True)
class Wrapped:
    """The parts of a wrapper. Stands for it in a state that is stored."""

    kind: type
    size: tuple[int, ...]
    stride: tuple[int, ...]
    context: Any
    """The rest of ``__tensor_flatten__``."""
    inner: dict[str, Any]
    """Tensors, or further wrappers, by the name of their attribute."""

    @classmethod
    def of(cls, value: torch.Tensor) -> Wrapped:
        """Take a wrapper apart. Shares the memory of its tensors."""
        flat: Any = value
        names, context = flat.__tensor_flatten__()
        inner = {name: getattr(value, name) for name in names}
        return cls(type(value), tuple(value.shape), tuple(value.stride()), context, inner)

    @property
    def name(self) -> str:
        return class_name(self.kind)

    def build(self, path: str) -> torch.Tensor:
        """Return a wrapper around ``inner``. Raises ``StateMismatch`` if its class refuses."""
        kind: Any = self.kind
        try:
            built: torch.Tensor = kind.__tensor_unflatten__(
                self.inner, self.context, torch.Size(self.size), torch.Size(self.stride)
            )
        except Exception as error:  # the code of another library
            raise StateMismatch(
                f"{path} is a {self.name}, whose class here cannot build it from what was stored "
                f"({type(error).__name__}: {error}): use the version of its library that stored it"
            ) from error
        return built


def is_wrapper(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a tensor that wraps others, and no DTensor."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in PLAIN_TENSORS
        and hasattr(value, "__tensor_flatten__")
        and value.layout is torch.strided
        and not is_dtensor(value)
    )


def is_whole_value(value: object) -> bool:
    """Return whether ``value`` is a tensor that is stored as one value: a wrapper, or one of a quantized dtype."""
    if not isinstance(value, torch.Tensor) or is_sharded_tensor(value):  # which knows none of these properties
        return False
    return is_wrapper(value) or value.is_quantized


def refusal(tensor: torch.Tensor, path: str) -> UnsupportedValue:
    """Return the error of a tensor that is not dense, has no data, or has a dtype that cannot be stored."""
    return UnsupportedValue(
        f"{path} is a {'nested ' if tensor.is_nested else ''}tensor of {tensor.dtype}, {tensor.layout}, on "
        f"{tensor.device}: expected a dense tensor with data. Store to_dense(), or the tensors that it consists of"
    )


def plain(value: torch.Tensor, path: str) -> torch.Tensor:
    """Return ``value`` without its graph. Raises ``UnsupportedValue`` if it is not an ordinary tensor with memory."""
    tensor = value.detach()
    if type(tensor) not in PLAIN_TENSORS:
        raise UnsupportedValue(
            f"{path} is a {class_name(type(value))}, which cannot be stored here: convert it to a plain tensor (a "
            f"subclass that wraps others is stored if it has __tensor_flatten__, and only whole)"
        )
    return tensor
