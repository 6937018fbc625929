"""Sharding of the state of an optimizer, from the sharding of the model's parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace

import torch

from keepstep.state.values.sharding import is_dtensor
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import nested_values
from keepstep_megatron.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from keepstep_megatron.prefixes import extract_sharded_tensors_and_factories
from keepstep_mesh.config.logging import get_logger

log = get_logger("keepstep.sharded")


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Return the number of each parameter in the state of its optimizer.

    Args:
        optim_params_iter: parameters, in the order of the optimizer.

    Returns:
        ``{id(parameter): number}``. Of a parameter that occurs twice, the first number.
    """
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(_local(param)), number)
    return numbers


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # the same object at every call, not a view that autograd knows
        return tensor.to_local()


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Return the sharded leaf of each parameter that the optimizer has.

    Args:
        model_sharded_state_dict: sharded leaves of the model, in any structure. Their ``data`` are the parameters
            themselves: make it from ``state_dict(keep_vars=True)``.
        optim_params_iter: parameters, in the order of the optimizer.

    Returns:
        ``{number of the parameter in the optimizer: its leaf}``. Parameters without a leaf are missing.
    """
    numbers = get_optim_param_to_id_map(optim_params_iter)
    leaves, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    found = {numbers[id(leaf.data)]: leaf for leaf in nested_values(leaves) if id(leaf.data) in numbers}
    if numbers and not found:
        log.warning(
            "no parameter of the optimizer is in the sharded state dict: make that from "
            "model.state_dict(keep_vars=True), so that it has the parameters and not copies of them"
        )
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Return the leaf of a tensor in the state of an optimizer. It is sharded as the parameter is.

    Args:
        model_param: leaf of the parameter.
        optim_param: tensor of the optimizer, with the shape of the parameter; any dtype.
        prefix: put before the key of the parameter, with a dot between.

    Raises:
        CheckpointingException: the tensor has another shape than the parameter.
    """
    tensor, key = _local(optim_param), f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=tensor)
    if tuple(tensor.shape) != model_param.data_shape:
        raise CheckpointingException(
            f"optimizer state {key!r} has shape {tuple(tensor.shape)}, but its parameter has {model_param.data_shape}: "
            f"expected equal shapes; exclude state of another shape, such as exclude_keys=('step',)"
        )
    return replace(model_param, key=key, data=tensor, dtype=tensor.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedTensor | ShardedTensorFactory],
    exclude_keys: Collection[str] | str = (),
) -> None:
    """Replace the tensors in the state of an optimizer by sharded leaves, in place.

    The keys are ``optimizer.state.NAME.PARAMETER``, such as ``optimizer.state.exp_avg.layer.weight``. The lists
    ``params`` of the parameter groups become ``LocalNonpersistentObject``.

    Args:
        optim_state_dict: from ``optimizer.state_dict()``: a dict with ``state`` and ``param_groups``; changed. If this
            raises, it is not changed.
        id_to_sharded_param_map: from ``get_param_id_to_sharded_param_map``.
        exclude_keys: names in the state of a parameter that are left out, such as ``("step",)``; or one name.

    Raises:
        ValueError: a parameter has no sharded leaf, or an argument is invalid.
        CheckpointingException: state of a parameter has another shape than the parameter.
    """
    excluded = (exclude_keys,) if isinstance(exclude_keys, str) else exclude_keys  # Megatron Core passes "step"
    absent = {"state", "param_groups"} - optim_state_dict.keys()
    if absent:
        raise ValueError(f"optim_state_dict has no {sorted(absent)}: expected the result of optimizer.state_dict()")
    sharded: dict[int, dict[str, ShardedTensor | ShardedTensorFactory]] = {}
    for number, state in optim_state_dict["state"].items():
        kept = {name: tensor for name, tensor in state.items() if name not in excluded}
        if kept and number not in id_to_sharded_param_map:
            raise ValueError(
                f"parameter {number} of the optimizer has no sharded leaf: expected one of each parameter; those of "
                f"{sorted(id_to_sharded_param_map)} were given"
            )
        sharded[number] = {
            name: make_sharded_optimizer_tensor(id_to_sharded_param_map[number], tensor, f"optimizer.state.{name}")
            for name, tensor in kept.items()
        }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["state"], optim_state_dict["param_groups"] = sharded, groups
