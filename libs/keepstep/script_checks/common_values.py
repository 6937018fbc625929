"""Values that a script chooses, and that all groups must have in common, because equal weights follow from them.

* **The order of the parameters of each optimizer.** A group that heals takes over the optimizer's state by position.
* **The param groups in each step**: learning rate, weight decay, ``foreach``, and all others that are numbers, strings,
  booleans or None, alone or in tuples and lists. A tensor of one element counts on the CPU; on another device, to read
  it would wait for the device in each step.
* **The modules whose gradients a step reduced**, in the order in which it did, for models that FSDP2 shards: the groups
  average by the order of their reductions, so that gradients of different modules would meet.
* **Frozen parameters that are not registered**, such as the base of a model of which only adapters are. No heal makes
  them equal, as torch's DDP does when it wraps the model.
* **The arithmetic of the process**, as far as the step of an optimizer, or a norm of averaged gradients, depends on it.
  Averaged gradients are equal in all groups, so what only their computation depends on may differ.

Modules and optimizers are added as they are wrapped. On the training thread.
"""

from __future__ import annotations

import hashlib
import numbers
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.group.agreement import Values

_NO_VALUES = frozenset({"params", "param_names"})
_SKIPPED = object()
_FIXED = (float, int, str, type(None))
"""Types of values that do not change in place. Neither does a tuple of them."""
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
        self._reductions: list[str] = []
        """Of the open step."""
        self._settings: tuple[list[tuple[str, str]], str] = ([], "")
        """The arithmetic of the last step, and its text."""
        self._last: Values = ()
        """Values of the last step."""
        self.frozen = ""
        """Frozen parameters of the modules that are not in the registered state, as text; empty: none, or unknown."""

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

    def begin_step(self) -> None:
        """Forget the reductions of the step before."""
        self._reductions = []

    def add_reduction(self, what: str) -> None:
        """Note that the open step reduces the gradients of ``what`` now."""
        self._reductions.append(what)

    def turn_of(self, optimizer: Optimizer) -> str:
        """Return which parameters ``optimizer`` has, as text that is the same in all groups, if ``take_turns``."""
        mine = next((one for one in self._optimizers if one.ref() is optimizer), None) if self.take_turns else None
        return "" if mine is None else mine.turn(optimizer, self._names)

    @property
    def take_turns(self) -> bool:
        """Whether several optimizers of the script may begin a step."""
        return sum(not one.known for one in self._optimizers) > 1

    def take_new(self) -> tuple[list[list[str]], dict[str, str]] | None:
        """Return what the groups compare before a step, if something was added since the last call.

        Returns:
            Of each new optimizer a line for each parameter, and the arithmetic of the process; None: nothing is new.
        """
        added, self._added = self._added, None
        if added is None:
            return None
        names = self._names()
        lines = [optimizer_lines(optimizer, names | one.known) for one in added if (optimizer := one.ref()) is not None]
        return lines, dict(self._arithmetic())

    def of_step(self) -> Values:
        """Return the values that the optimizers have now, and the reductions of the step; empty without both.

        While nothing changes it is the same object.
        """
        found: list[tuple[str, str]] = []
        live = [(one, optimizer) for one in self._optimizers if (optimizer := one.ref()) is not None]
        for place, (one, optimizer) in enumerate(live):
            title = f"{type(optimizer).__name__}{f' {place}' if len(live) > 1 else ''} param group"
            found += [(f"{title} {n}", text) for n, text in enumerate(one.texts(optimizer, self._names))]
        if self._reductions:
            found.append(("all-reduce", "\n".join(f"{n}\t{what}" for n, what in enumerate(self._reductions, 1))))
        if not found:
            return ()
        others = [("frozen parameters that are not registered", self.frozen)] if self.frozen else []
        settings = [*others, *self._arithmetic()]
        if settings != self._settings[0]:
            self._settings = settings, "\n".join(f"{name}\t{value}" for name, value in settings)
        values = (*found, ("", self._settings[1]))
        if values != self._last:
            self._last = values
        return self._last

    def _names(self) -> dict[int, str]:
        """Return the name of each parameter of the modules, by its id. Modules that come later change no name."""
        return {
            id(parameter): f"module {number} {name}" if number else name
            for number, one in enumerate(self._modules)
            if (module := one()) is not None
            for name, parameter in module.named_parameters()
        }

    def _arithmetic(self) -> Iterator[tuple[str, str]]:
        return arithmetic(self._averaged, self._stepped)


def arithmetic(averaged: AbstractSet[str], stepped: AbstractSet[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yield name and value of each setting of this process that decides the bits of a step.

    Args:
        averaged: types of the devices on which modules compute.
        stepped: the same, of optimizers that step in all groups with equal gradients.
    """
    devices = averaged | stepped
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
    if "cpu" in averaged:  # an outer optimizer computes no sum, whose order the threads decide
        yield "OMP_NUM_THREADS", str(torch.get_num_threads())


@dataclass(slots=True)
class _Compared:
    """An optimizer, and the texts of its param groups when they were last read."""

    ref: weakref.ref[Optimizer]
    known: dict[int, str]
    """Names of parameters, by their id."""
    _key: list[tuple[int, int]] = field(default_factory=list)
    _groups: list[_GroupText] = field(default_factory=list)
    _turn: tuple[list[tuple[int, int]], str] = ([], "")
    """The parameters as in ``_key``, and their text."""

    def turn(self, optimizer: Optimizer, names: Callable[[], dict[int, str]]) -> str:
        """Return the parameters as text. ``names``: as of ``texts``."""
        key = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        if key != self._turn[0]:
            every = names() | self.known
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            first = _name(parameters[0], every) if parameters else "none"
            self._turn = key, f"{first} ... ({_order(parameters, every)})"
        return self._turn[1]

    def texts(self, optimizer: Optimizer, names: Callable[[], dict[int, str]]) -> list[str]:
        """Return the lines of the values of each param group. ``names``: called when the parameters have changed."""
        key = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        if key != self._key:
            every, self._key = names() | self.known, key
            self._groups = [_GroupText(_order(group["params"], every)) for group in optimizer.param_groups]
        return [text.of(group) for text, group in zip(self._groups, optimizer.param_groups, strict=True)]


class _GroupText:
    """The values of a param group as text. Only values that have changed since the last call are formatted again.

    ``order``: of its parameters, as text.
    """

    def __init__(self, order: str) -> None:
        self._order = order
        self._keys: list[str] = []
        self._seen: list[object] = []
        """The value of each key; ``_SKIPPED`` for one that may change in place."""
        self._lines: list[str] = []
        self._joined = ""
        self._size = -1

    def of(self, group: dict[str, object]) -> str:
        try:
            values = [group[key] for key in self._keys] if len(group) == self._size else None
        except KeyError:
            values = None
        if values is None:
            self._keys = sorted((key for key in group if key not in _NO_VALUES), key=str)
            values, self._size, self._joined = [group[key] for key in self._keys], len(group), ""
            self._seen, self._lines = [_SKIPPED] * len(values), [""] * len(values)
        if self._joined and all(map(operator.is_, values, self._seen)):
            return self._joined
        for place, value in enumerate(values):
            if value is not self._seen[place]:
                text = plain(value)
                line = "" if text is _SKIPPED else f"{self._keys[place]}\t{text!r}"
                self._seen[place] = value if _is_fixed(value) else _SKIPPED
                if line != self._lines[place]:
                    self._lines[place], self._joined = line, ""
        if not self._joined:
            self._joined = "\n".join([*filter(None, self._lines), f"params\t{self._order}"])
        return self._joined


def _is_fixed(value: object) -> bool:
    return isinstance(value, _FIXED) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


def _order(parameters: list[torch.Tensor], names: Mapping[int, str]) -> str:
    text = "\n".join(_name(one, names) for one in parameters)
    return f"{len(parameters)} in order {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


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
