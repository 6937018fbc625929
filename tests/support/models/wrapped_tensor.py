"""A tensor subclass that wraps others, as quantized optimizer states do: bytes, and a scale to read them by."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._pytree import tree_map


class ScaledTensor(torch.Tensor):
    """``codes * scale``. Not registered for torch's safe loading."""

    codes: torch.Tensor
    scale: torch.Tensor
    note: tuple[Any, ...]

    @staticmethod
    def __new__(
        cls: type[Self], codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, note: tuple[Any, ...] = ()
    ) -> Self:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        wrapper.codes, wrapper.scale, wrapper.note = codes, scale, note
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.dtype, self.note)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, _outer_size: Any, _outer_stride: Any
    ) -> Self:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = tree_map(lambda one: one.value() if isinstance(one, ScaledTensor) else one, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def value(self) -> torch.Tensor:
        """Return the numbers that the wrapper stands for."""
        return self.codes.to(self.dtype) * self.scale


class RegisteredTensor(ScaledTensor):
    """The same, registered for torch's safe loading."""


torch.serialization.add_safe_globals([RegisteredTensor])


def scaled(
    seed: int,
    kind: type[ScaledTensor] = RegisteredTensor,
    shape: tuple[int, ...] = (4, 8),
    dtype: torch.dtype = torch.bfloat16,
) -> ScaledTensor:
    """Return a wrapper with random values."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 127, shape, generator=random, dtype=torch.int8)
    return kind(codes, torch.rand((), generator=random), dtype, ("blocks", 1))


def parts(value: ScaledTensor) -> tuple[type, Any, dict[str, Any]]:
    """Return all that a wrapper has, as values that can be compared."""
    names, context = value.__tensor_flatten__()
    return type(value), context, {name: getattr(value, name).tolist() for name in names}
