"""Places for what a checkpoint has of an optimizer or a learning rate scheduler, and the script does not have yet.

``torch.load`` and ``load_state_dict`` give an optimizer all that was saved of it: its state before the first step, and
keys of a parameter group that only a scheduler sets, such as ``initial_lr``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from keepstep.checkpoint.stored import StoredCheckpoint
from keepstep.state.errors import CheckpointError
from keepstep.state.values.sharding import is_dtensor, new_like
from keepstep_mesh.protocol.stored_keys import Index, Path, key_of


def complete(owner: object, state: dict[str, Any], path: Path, stored: StoredCheckpoint) -> None:
    """Add a place to ``state`` for each value that the checkpoint has of ``owner``, if that is one of these kinds.

    The place of a value is None: a load creates it. State of a DTensor parameter with the shape of the parameter is a
    new DTensor, which is sharded alike. State of parameters that had none when the optimizer was saved is left out.

    Args:
        owner: an object with ``state_dict``.
        state: its state dict.
        path: of the state dict in the state that is loaded.
        stored: the checkpoint.

    Raises:
        CheckpointError: the optimizer has other parameters or parameter groups than the one that was saved.
    """
    if not isinstance(owner, Optimizer | LRScheduler):
        return
    below = {key: one[len(path) :] for key, one in stored.paths.items() if _texts(one[: len(path)]) == _texts(path)}
    if isinstance(owner, Optimizer):
        if not _has_groups(state):
            return
        _check_groups(state, path, below, stored)
        stepped = {key_of(steps[1:2]) for steps in below.values() if _texts(steps[:1]) == ["state"]}
        state["state"] = {
            key: dict(one) if isinstance(one, dict) else one
            for key, one in state["state"].items()
            if str(key) in stepped or not below
        }
    for key, steps in below.items():
        _add(state, steps, lambda steps=steps, key=key: _place_of(owner, steps, key, stored))


def _has_groups(state: dict[str, Any]) -> bool:
    """Return whether a state dict has the form of torch's optimizers."""
    return isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)


def _texts(path: Path) -> list[str]:
    """Return the steps of a path as text: torch's planners store all keys of dicts so."""
    return [key_of((step,)) for step in path]


def _check_groups(state: dict[str, Any], path: Path, below: dict[str, Path], stored: StoredCheckpoint) -> None:
    name, groups = key_of((*path, "param_groups")), state["param_groups"]
    there = {
        steps[1].number: stored.value(key)
        for key, steps in below.items()
        if _texts(steps[::2]) == ["param_groups", "params"] and isinstance(steps[1], Index) and key in stored.objects
    }
    if there and there.keys() != set(range(len(groups))):
        raise CheckpointError(
            f"{name} has {len(groups)} groups here, but {len(there)} in the checkpoint: create the optimizer with the "
            f"groups that were saved"
        )
    for number, parameters in there.items():
        here = groups[number]["params"]
        if len(here) != len(parameters):
            raise CheckpointError(
                f"{name}.{number} has {len(here)} parameters here, but {len(parameters)} in the checkpoint: create the "
                f"optimizer with the parameters that were saved"
            )


def _add(container: Any, steps: Path, create: Any) -> None:
    """Add what ``create`` returns at the end of ``steps``, if no value is there. Do nothing in another structure."""
    for at, step in enumerate(steps):
        is_last = at == len(steps) - 1
        following: Any = None if is_last else [] if isinstance(steps[at + 1], Index) else {}
        if isinstance(step, Index):
            if not isinstance(container, list) or step.number > len(container):
                return  # the load refuses a list of another length
            if step.number == len(container):
                container.append(create() if is_last else following)
            container = container[step.number]
        else:
            if not isinstance(container, dict):
                return
            key = _key_in(container, step)
            if key not in container:
                container[key] = create() if is_last else following
            container = container[key]


def _key_in(container: dict[Any, Any], step: Any) -> Any:
    """Return the key of ``container`` for a step: a number if it has numbers, which torch's planners store as text."""
    if step in container or type(step) is not str or not step.isdecimal():
        return step
    return step if any(type(key) is str for key in container) else int(step)


def _place_of(owner: object, steps: Path, key: str, stored: StoredCheckpoint) -> Any:
    """Return None, or the tensor to load into."""
    tensor = stored.tensors.get(key)
    if tensor is not None and isinstance(steps[-1], Index):  # a list of None would be one plain value
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor is None or not isinstance(owner, Optimizer) or len(steps) < 3 or steps[0] != "state":
        return None
    parameters = [one for group in owner.param_groups for one in group["params"]]
    number = int(steps[1]) if str(steps[1]).isdecimal() else len(parameters)
    if number >= len(parameters) or not is_dtensor(parameters[number]) or parameters[number].shape != tensor.shape:
        return None
    return new_like(parameters[number], dtype=tensor.dtype)
