"""The parameters of a module whose gradients are averaged, and what may change in them while the script trains.

A script may freeze, unfreeze, add, replace or cast parameters between two steps. The *members* are all parameters that
were trainable at a step so far. A parameter that is frozen later stays a member that no pass uses. A parameter that
becomes trainable is a member from the next step on. All groups compare the members with each quorum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from keepstep.data_parallel.synced_buffers import AVERAGED_DTYPES
from keepstep.state.values.sharding import is_dtensor
from keepstep_mesh.text import listed

MAX_NAMED = 3
"""Parameters that an error names."""


class TrainedParameters:
    """The members of one module.

    Args:
        module: the module that the script trains.
        ignored: names of parameters that are never averaged (``_ddp_params_and_buffers_to_ignore`` of torch).

    Raises:
        ValueError: the gradient of a parameter cannot be averaged.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module = module
        self._ignored = frozenset(ignored)
        self._trained: frozenset[str] = frozenset()
        """Names of the members."""
        self.members: dict[str, nn.Parameter] = {}
        """By name, in the module's order."""
        self.sparse: frozenset[str] = frozenset()
        """Names of those whose gradients are sparse."""
        self._identity: list[tuple[object, ...]] = []
        self.refresh()

    def lines(self) -> list[str]:
        """Return the lines of the layout, one for each member."""
        return [self._line(name, one) for name, one in self.members.items()]

    def changed(self) -> bool:
        """Return whether any parameter of the module has changed since ``refresh``, also in ``requires_grad`` only."""
        return self._facts != self._read()

    def outside(self) -> list[str]:
        """Return the trainable parameters that are no members, or are other tensors than when they became members."""
        known = {id(one) for one in self.members.values()}
        was = dict(zip(self.members, self._forms, strict=True))
        return [
            name
            for name, one in self._named()
            if one.requires_grad and (id(one) not in known or was.get(name, _form(one)) != _form(one))
        ]

    def refresh(self, adopted: Iterable[str] = ()) -> bool:
        """Find the members again. Return whether a reducer of the earlier members no longer fits.

        Args:
            adopted: names of further members, because other groups train them.
        """
        before = self._identity
        named = dict(self._named())
        self._trained = frozenset(
            name for name, one in named.items() if one.requires_grad or name in self._trained
        ).union(adopted)
        self.members = {name: one for name, one in named.items() if name in self._trained}
        self.sparse = frozenset(_sparse_names(self._module)) & self._trained
        for name, one in self.members.items():
            _check(name, one)
        self._forms = [_form(one) for one in self.members.values()]
        self._identity = [(name, id(one), *_form(one)) for name, one in self.members.items()]
        self._owners = [(one._parameters, one._modules) for one in self._module.modules()]  # noqa: SLF001
        self._facts = self._read()
        return self._identity != before

    def adoptable(self, lines: Iterable[str]) -> list[str]:
        """Return the names of the first ``lines``, as far as these are parameters of the module in its order."""
        remaining = iter([(name, self._line(name, one)) for name, one in self._named()])
        names: list[str] = []
        for line in lines:
            name = next((name for name, its in remaining if its == line), None)
            if name is None:
                break
            names.append(name)
        return names if self._trained <= set(names) else []

    def _line(self, name: str, parameter: nn.Parameter) -> str:
        sparse = " sparse gradients" if name in self.sparse else ""
        order = _order_in_memory(parameter)
        return f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.device.type}{order}{sparse}"

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, one) for name, one in self._module.named_parameters() if name not in self._ignored]

    def _read(self) -> list[object]:
        """Read what a change would change, at each step: quick, and without the names."""
        return [
            (id(one), one.requires_grad, one.dtype, one.device, one.layout is torch.strided and one.stride())
            for parameters, _ in self._owners
            for one in parameters.values()
            if one is not None
        ] + [id(one) for _, modules in self._owners for one in modules.values()]


def left_out(names: list[str]) -> str:
    """Describe trainable parameters that a step did not average."""
    return (
        f"{len(names)} parameters ({listed(names, MAX_NAMED)}) were unfrozen, added, replaced or cast after the step "
        f"had begun, so their gradients were not averaged: this step is discarded, and they are averaged from the next "
        f"one on; change parameters between two steps, before zero_grad() or start_quorum()"
    )


def _form(parameter: torch.Tensor) -> tuple[object, ...]:
    return parameter.shape, parameter.dtype, parameter.device, parameter.stride()


def _order_in_memory(parameter: torch.Tensor) -> str:
    """Return the strides of a parameter that is not in torch's usual order, such as channels_last.

    A bucket of torch's reducer has the gradients in the order of their parameters in memory.
    """
    return "" if parameter.is_contiguous() else f" strides {parameter.stride()}"


def _check(name: str, parameter: nn.Parameter) -> None:
    """Raise ValueError if no process group can average the gradient of ``parameter``."""
    if is_dtensor(parameter):
        raise ValueError(
            f"parameter {name!r} is a DTensor, whose gradient this class does not average: call "
            f"keepstep.device_mesh.average_over_groups(model, manager) for a model that fully_shard has sharded"
        )
    if parameter.layout is not torch.strided:
        raise ValueError(
            f"parameter {name!r} has the layout {parameter.layout}, and gradients of strided parameters are averaged "
            f"only: use a dense parameter; nn.Embedding(sparse=True) has one, and its sparse gradients are averaged"
        )
    if parameter.dtype not in AVERAGED_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in AVERAGED_DTYPES)
        raise ValueError(
            f"parameter {name!r} is {parameter.dtype}, whose gradient cannot be averaged, expected one of {known}: "
            f"cast it, or freeze it before you wrap the model"
        )


def _sparse_names(module: nn.Module) -> list[str]:
    """Return the names of the weights with sparse gradients, as torch's DistributedDataParallel finds them."""
    weights = {
        id(one.weight) for one in module.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse
    }
    return [name for name, one in module.named_parameters() if id(one) in weights]
