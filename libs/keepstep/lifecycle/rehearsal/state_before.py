"""Memory of tensors, gradients, optimizers and random generators, as they were before a rehearsal."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.state.values.sharding import is_dtensor
from keepstep.state.values.tensors_in_containers import tensors_in


class StateBefore:
    """A copy of everything that ``restore`` puts back. Copies are in main memory.

    Args:
        trained: modules and optimizers, with their parameters, buffers and gradients.
        registered: containers with further tensors.
    """

    def __init__(self, trained: Iterable[nn.Module | Optimizer], registered: Any) -> None:
        trained = list(trained)
        modules = [one for one in trained if isinstance(one, nn.Module)]
        optimizers = [one for one in trained if isinstance(one, Optimizer)]
        parameters = [one for module in modules for one in module.parameters()]
        parameters += [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        distinct = {id(one): one for one in parameters}.values()
        self._gradients = [(one, one.grad) for one in distinct]
        self._memory = _Memory()
        self._memory.add(distinct)
        self._memory.add(grad for _, grad in self._gradients if grad is not None)
        self._memory.add(one for module in modules for one in module.buffers())
        self._memory.add(tensors_in([dict(one.state) for one in optimizers]))
        self._memory.add(tensors_in([one.param_groups for one in optimizers]))
        self._memory.add(tensors_in(registered))
        self._optimizers = [_OptimizerBefore(one) for one in optimizers]
        self._generators = _Generators()

    def restore(self) -> None:
        """Put everything back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for optimizer in self._optimizers:
            optimizer.restore()
        self._memory.restore()
        self._generators.restore()


class _Memory:
    """The bytes behind tensors, each storage once."""

    def __init__(self) -> None:
        self._copies: dict[tuple[torch.device, int], tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors_in(list(tensors)):
            local = tensor.to_local() if is_dtensor(tensor) else tensor
            if local.layout is not torch.strided or local.is_meta:
                continue
            storage = local.untyped_storage()
            key = storage.device, storage.data_ptr()
            if storage.nbytes() and key not in self._copies:
                self._copies[key] = storage, _bytes_of(storage).to("cpu", copy=True)

    def restore(self) -> None:
        for storage, copy in self._copies.values():
            if storage.nbytes() == len(copy):  # else it was freed, as FSDP does with gathered parameters
                _bytes_of(storage).copy_(copy)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _OptimizerBefore:
    """The entries of an optimizer's state and groups; ``_Memory`` has the values of tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = [(key, value, _shallow(value)) for key, value in optimizer.state.items()]
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]

    def restore(self) -> None:
        state = self._optimizer.state
        state.clear()
        for key, value, before in self._state:
            if before is not None:
                value.clear()
                value.update(before)
            state[key] = value
        for group, before in self._groups:
            group.clear()
            group.update(before)


def _shallow(value: object) -> dict[Any, Any] | None:
    return dict(value) if isinstance(value, dict) else None


class _Generators:
    """The default random generators: of Python, of numpy if it is loaded, and of torch on each device in use."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
