"""Values that a script chooses, and that all groups must have in common, because equal weights follow from them.

* **The order of the parameters of each optimizer.** A group that heals takes over the optimizer's state by position.
* **The param groups in each step**: learning rate, weight decay, ``foreach``, and all others that are numbers, strings,
  booleans or None, alone or in tuples and lists. A tensor of one element counts on the CPU; on another device, to read
  it would wait for the device in each step.
* **The arithmetic of the process**, as far as the step of an optimizer, or a norm of averaged gradients, depends on it.
  Averaged gradients are equal in all groups, so what only their computation depends on may differ.

Modules and optimizers are added as they are wrapped. On the training thread.
"""

from __future__ import annotations

import hashlib
import numbers
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.group.step_values import Values

_NO_VALUES = frozenset({"params", "param_names"})
_SKIPPED = object()
_LEAST_NORMAL = sys.float_info.min


class CommonValues:
    """The modules and optimizers of one process."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[_Compared] = []
        self._added: list[_Compared] | None = None
        """Optimizers since ``take_new``; None: neither those nor modules."""
        self._averaged: set[str] = set()
        """Types of the devices of the modules, and of the optimizers below."""
        self._stepped: set[str] = set()

    def add_module(self, module: nn.Module) -> None:
        """Add a module whose gradients are averaged."""
        self._modules.append(weakref.ref(module))
        self._averaged |= {parameter.device.type for parameter in module.parameters()}
        self._added = self._added or []

    def add_optimizer(self, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor] | None = None) -> None:
        """Add an optimizer that steps in all groups with equal gradients.

        Args:
            optimizer: not a ``keepstep.Optimizer``.
            parameters: by name, if they are in no module that is added.
        """
        known = {} if parameters is None else {id(one): name for name, one in parameters.items()}
        added = _Compared(weakref.ref(optimizer), known)
        self._optimizers.append(added)
        self._stepped |= {one.device.type for group in optimizer.param_groups for one in group["params"]}
        self._added = [*(self._added or []), added]

    def take_new(self) -> tuple[list[str], dict[str, str]] | None:
        """Return what the groups compare before a step, if something was added since the last call.

        Returns:
            A line for each parameter of the new optimizers, and the arithmetic of the process; None: nothing is new.
        """
        added, self._added = self._added, None
        if added is None:
            return None
        names = self._names()
        lines = [
            line
            for one in added
            if (optimizer := one.ref()) is not None
            for line in optimizer_lines(optimizer, names | one.known)
        ]
        return lines, dict(self._arithmetic())

    def of_step(self) -> Values:
        """Return the values that the optimizers have now; empty without optimizers."""
        found: list[tuple[str, tuple[tuple[str, object], ...]]] = []
        live = [(one, optimizer) for one in self._optimizers if (optimizer := one.ref()) is not None]
        for place, (one, optimizer) in enumerate(live):
            title = f"{type(optimizer).__name__}{f' {place}' if len(live) > 1 else ''} param group"
            orders = one.orders(optimizer, self._names)
            for number, (group, order) in enumerate(zip(optimizer.param_groups, orders, strict=True)):
                values = [(str(key), plain(value)) for key, value in group.items() if key not in _NO_VALUES]
                kept = sorted((pair for pair in values if pair[1] is not _SKIPPED), key=lambda pair: pair[0])
                found.append((f"{title} {number}", (*kept, ("params", order))))
        return (*found, ("", tuple(self._arithmetic()))) if found else ()

    def _names(self) -> dict[int, str]:
        """Return the name of each parameter of the modules, by its id."""
        live = [module for one in self._modules if (module := one()) is not None]
        several = len(live) > 1
        return {
            id(parameter): f"module {number} {name}" if several else name
            for number, module in enumerate(live)
            for name, parameter in module.named_parameters()
        }

    def _arithmetic(self) -> Iterator[tuple[str, str]]:
        devices = self._averaged | self._stepped
        if not devices:
            return
        yield "torch", torch.__version__.partition("+")[0]
        yield "use_deterministic_algorithms", str(torch.are_deterministic_algorithms_enabled())
        if "cuda" in devices:
            yield "cuda.matmul.fp32_precision", str(torch.backends.cuda.matmul.fp32_precision)
        if "cpu" in devices:
            yield "ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability()
            yield "flush_denormal", str(_LEAST_NORMAL / 2 == 0)
            yield "mkldnn.matmul.fp32_precision", str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
        if (
            "cpu" in self._averaged
        ):  # an outer optimizer computes no sum, in which the number of threads decides the order
            yield "OMP_NUM_THREADS", str(torch.get_num_threads())


@dataclass(slots=True)
class _Compared:
    ref: weakref.ref[Optimizer]
    known: dict[int, str]
    """Names of parameters, by their id."""
    _key: list[tuple[int, int]] = field(default_factory=list)
    _orders: list[str] = field(default_factory=list)

    def orders(self, optimizer: Optimizer, names: Callable[[], dict[int, str]]) -> list[str]:
        """Return the order of the parameters of each param group as a short text; computed when they change."""
        key = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        if key != self._key:
            every, self._key, self._orders = names() | self.known, key, []
            for group in optimizer.param_groups:
                text = "\n".join(_name(one, every) for one in group["params"])
                digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
                self._orders.append(f"{len(group['params'])} in order {digest}")
        return self._orders


def optimizer_lines(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return a line for each parameter of ``optimizer`` in its order. ``names``: by the id of a parameter."""
    return [
        f"{type(optimizer).__name__} param group {number}: {_name(one, names)}"
        for number, group in enumerate(optimizer.param_groups)
        for one in group["params"]
    ]


def plain(value: object) -> object:
    """Return a value of a param group as it is compared: numbers as floats, lists as tuples; else ``_SKIPPED``."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (tuple, list)):
        several = tuple(map(plain, value))
        return _SKIPPED if _SKIPPED in several else several
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return plain(value.item())
    return _SKIPPED


def _name(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    return names.get(id(parameter)) or f"shape {tuple(parameter.shape)}"
