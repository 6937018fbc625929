"""The state of one rank, cut into slices of parameters, and the gradients of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.one_copy.core.copy_ledger import SLICES, cut, steps_of_round
from keepstep.state.values.sharding import is_dtensor, sharding_of
from keepstep_mesh.errors import KeepstepError

Boxes = dict[str, list[list[int]]]
"""For a parameter by name: the shape of the whole parameter, and the offset and the shape of the shard in it."""


class OtherModelError(KeepstepError):
    """``build`` returns another model or optimizer than that of the job."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, in the same memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():  # to_local copies nothing then, and needs no step of autograd
        found: torch.Tensor = tensor.to_local()
    return found.detach()


class RankState:
    """The model and the optimizer of one rank.

    Args:
        model: its parameters may be DTensors or plain tensors.
        optimizer: of parameters of the model.

    Raises:
        KeepstepError: the optimizer has a parameter that is not of the model.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [one for _, one in model.named_parameters()]
        known = {id(one): index for index, one in enumerate(self.parameters)}
        self._group_of: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for one in group["params"]:
                if id(one) not in known:
                    raise KeepstepError(
                        f"the optimizer has a parameter of shape {tuple(one.shape)} that is not of the model which "
                        f"build() returns; return the module that has it"
                    )
                self._group_of[known[id(one)]] = number
        sizes = [self._bytes(index) for index in range(len(self.parameters))]
        self.nbytes = sum(sizes)
        """Bytes of the parameters and their optimizer state on this rank; before the first step an estimate."""
        gradients = sum(_nbytes(self.parameters[index]) for index in self._group_of)
        self.slices = cut(sizes, SLICES)
        """Indices into ``parameters`` of each slice."""
        count = max(1, len(self.slices))
        largest = max((sum(sizes[index] for index in one) for one in self.slices), default=0)
        self.slices_per_step = count / steps_of_round(self.nbytes, gradients, count, largest)
        """Number of slices whose bases are sent in a step, on average."""
        self.boxes = self._boxes()
        """The box of each shard in its parameter. A DTensor computes it from the rank, which may change."""
        self.device = next((one.device for one in self.parameters), torch.device("cpu"))
        """Of the parameters."""

    def _bytes(self, index: int) -> int:
        state = self.optimizer.state.get(self.parameters[index], {})
        kept = sum(_nbytes(one) for one in state.values() if isinstance(one, torch.Tensor))
        own = _nbytes(self.parameters[index])
        return own + (kept or own * self._states_to_come(index))

    def _states_to_come(self, index: int) -> int:
        """Return how many tensors like the parameter its state will have, before the first step: two, as Adam's."""
        if index not in self._group_of:
            return 0
        if type(self.optimizer) is torch.optim.SGD:
            return int(bool(self.optimizer.param_groups[self._group_of[index]]["momentum"]))
        return 2

    def names_of_slices(self) -> list[list[str]]:
        """Return the names of the parameters of each slice."""
        return [[self.names[index] for index in one] for one in self.slices]

    def _boxes(self) -> Boxes:
        found = {}
        for name, one in zip(self.names, self.parameters, strict=True):
            own = list(local(one).shape)
            if is_dtensor(one):
                sharding = sharding_of(one)
                found[name] = [list(sharding.global_shape), list(sharding.global_offset), own]
            else:
                found[name] = [own, [0] * len(own), own]
        return found

    # ---- for the keeper

    def base(self, number: int) -> dict[str, Any]:
        """Return the state of a slice, in the memory of the model and the optimizer."""
        return {self.names[index]: self._of_parameter(index) for index in self.slices[number]}

    def _of_parameter(self, index: int) -> dict[str, Any]:
        parameter = self.parameters[index]
        state = {
            key: local(value) if isinstance(value, torch.Tensor) else value
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {
            "parameter": local(parameter),
            "group": self._group_of.get(index),
            "state": state,
            "spread": spread_of(self.optimizer.state.get(parameter, {}), parameter),
        }

    def gradients(self, number: int) -> dict[str, torch.Tensor]:
        """Return the gradients of a slice, in their memory; those that are None are left out."""
        found = {}
        for index in self.slices[number]:
            gradient = self.parameters[index].grad
            if gradient is not None and index in self._group_of:
                found[self.names[index]] = local(gradient)
        return found

    def is_trained(self, index: int) -> bool:
        """Return whether the optimizer has the parameter."""
        return index in self._group_of

    def options(self) -> list[dict[str, Any]]:
        """Return the options of each parameter group, such as the learning rate.

        Torch steps groups with a DTensor one by one, and groups of tensors on a GPU together, unless they say how. A
        keeper has plain tensors, and must do as this rank does.

        Raises:
            OtherModelError: the optimizer has got other parameters, of which no keeper would have gradients.
        """
        found = []
        if (count := sum(len(group["params"]) for group in self.optimizer.param_groups)) != len(self._group_of):
            raise OtherModelError(
                f"the optimizer has {count} parameters, and had {len(self._group_of)} when build() returned it; give "
                f"it all parameters in build(), and freeze those that train later with requires_grad_(False)"
            )
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            if _steps_one_by_one(group):
                options["foreach"] = False
            found.append(options)
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the model, also those that a state dict leaves out."""
        return {name: local(one) for name, one in self.model.named_buffers()}

    # ---- for a rank that takes a state over

    def load(
        self, states: Iterable[dict[str, Any]], options: list[dict[str, Any]], *, given_away: bool = False
    ) -> None:
        """Load the state of all parameters.

        Args:
            states: of slices, as ``base`` returns them; those of this rank's shard, in any cut.
            options: of the parameter groups.
            given_away: the tensors of ``states`` have no other user, so that the optimizer may have them as they are.

        Raises:
            OtherModelError: names, shapes or groups differ from those of this model.
        """
        given: dict[str, Any] = {}
        for state in states:
            given.update(state)
        if set(given) != set(self.names) or len(options) != len(self.optimizer.param_groups):
            odd = sorted(set(given) ^ set(self.names))
            raise OtherModelError(
                f"build() returns another model than that of the job: {', '.join(odd[:3]) or 'the parameter groups'} "
                f"differ; build must return the same model in all processes"
            )
        with torch.no_grad():
            for index, name in enumerate(self.names):
                self._load(index, given[name], copy=not given_away)
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            group.update(values | ({"foreach": None} if _steps_one_by_one(group) else {}))  # as in the other ranks

    def _load(self, index: int, given: dict[str, Any], *, copy: bool) -> None:
        parameter, name = self.parameters[index], self.names[index]
        own, value = local(parameter), given["parameter"]
        if own.shape != value.shape or own.dtype != value.dtype or given["group"] != self._group_of.get(index):
            raise OtherModelError(
                f"build() returns another model than that of the job: the shard of {name!r} is {tuple(own.shape)} "
                f"{own.dtype}, and in the job {tuple(value.shape)} {value.dtype}; build must return the same model in "
                f"all processes"
            )
        own.copy_(value)
        if not given["state"]:
            self.optimizer.state.pop(parameter, None)
            return
        spread = given.get("spread", {})
        self.optimizer.state[parameter] = {
            key: self._like(parameter, one, spread.get(key), copy=copy) if isinstance(one, torch.Tensor) else one
            for key, one in given["state"].items()
        }

    @staticmethod
    def _like(parameter: torch.Tensor, value: torch.Tensor, spread: list[Any] | None, *, copy: bool) -> torch.Tensor:
        """Return a state tensor on the device of its parameter, and sharded like it, or as ``spread`` says."""
        own = local(parameter)
        if value.shape != own.shape and spread is None:  # a counter of steps stays where the optimizer has it
            return value.clone()
        moved = value.to(own.device, copy=copy)
        if not is_dtensor(parameter):
            return moved
        from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard  # noqa: PLC0415  loads slowly

        placements, shape, stride = parameter.placements, parameter.shape, parameter.stride()
        if spread is not None:
            kinds: dict[str, Callable[[Any], Placement]]
            kinds = {"shard": Shard, "replicate": lambda _: Replicate(), "partial": Partial}
            placements = tuple(kinds[kind](detail) for kind, detail in spread[0])
            shape, stride = torch.Size(spread[1]), tuple(spread[2])
        return DTensor.from_local(moved, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)

    def load_buffers(self, given: dict[str, torch.Tensor]) -> None:
        """Copy ``given`` into the buffers of the same names."""
        with torch.no_grad():
            for name, one in self.model.named_buffers():
                if name in given:
                    local(one).copy_(given[name])


def _steps_one_by_one(group: dict[str, Any]) -> bool:
    """Return whether torch steps the parameters of a group one by one, though its options do not say so."""
    return group.get("foreach", False) is None and any(is_dtensor(one) for one in group["params"])


def _nbytes(tensor: torch.Tensor) -> int:
    own = local(tensor)
    return own.numel() * own.element_size()


def _is_like(state: Any, parameter: torch.Tensor) -> bool:
    """Return whether a DTensor of the state of a parameter is sharded like it."""
    return (
        is_dtensor(parameter)
        and state.shape == parameter.shape
        and tuple(state.placements) == tuple(parameter.placements)
    )


def spread_of(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, list[Any]]:
    """Return how the DTensors of the state of a parameter are sharded, those that are not sharded like it."""
    return {key: _spread(one) for key, one in state.items() if is_dtensor(one) and not _is_like(one, parameter)}


def _spread(value: Any) -> list[Any]:
    """Return placements, shape and stride of a DTensor."""
    placements = [
        ["shard", one.dim] if one.is_shard() else ["replicate", 0] if one.is_replicate() else ["partial", one.reduce_op]
        for one in value.placements
    ]
    return [placements, list(value.shape), list(value.stride())]
