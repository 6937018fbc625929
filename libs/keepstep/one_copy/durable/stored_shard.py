"""The shard of a rank as a state that is stored: parameters and optimizer state by name, sharded as they are.

The names are those of ``torch.distributed.checkpoint.state_dict``, so that ``keepstep.checkpoint.load`` reads
``user.model`` and ``user.optim`` with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from keepstep.one_copy.copies.rank_state import RankState, local, spread_of
from keepstep.one_copy.core.holding import State
from keepstep.one_copy.shard.own_shard import Held, random_state
from keepstep.state.errors import StateMismatch
from keepstep_mesh.protocol import lineage as lineages


def stored(held: Held, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a rank, in the memory of the model and the optimizer.

    Args:
        held: its shard.
        shared: states that all ranks have in common.
    """
    tensors, optimizer = held.tensors, held.built.optimizer
    name_of = {id(one): name for name, one in zip(tensors.names, tensors.parameters, strict=True)}
    groups = [{**group, "params": [name_of[id(one)] for one in group["params"]]} for group in optimizer.param_groups]
    return {
        "user": {
            "model": _model(tensors),
            "optim": {
                "state": {name_of[id(one)]: dict(state) for one, state in optimizer.state.items()},
                "param_groups": groups,
            },
            "shared": dict(shared),
        },
        "rank": {"random": random_state()},
        "manager": {"step": held.state.step, "lineage": lineages.saved(held.state.lineage)},
    }


def receiver(tensors: RankState) -> dict[str, Any]:
    """Return the state into which a checkpoint is loaded, in the memory of a model that was just built."""
    return {"user": {"model": _model(tensors)}}


def _model(tensors: RankState) -> dict[str, torch.Tensor]:
    named = zip(tensors.names, tensors.parameters, strict=True)
    return {**{name: one.detach() for name, one in named}, **dict(tensors.model.named_buffers())}


def restore(held: Held, state: Mapping[str, Any], *, same_rank: bool) -> dict[str, Any]:
    """Put a loaded state into the model and the optimizer.

    Args:
        held: its ``state`` is set.
        state: as ``stored`` returned it, in these shards.
        same_rank: this rank has stored it.

    Returns:
        The states that all ranks have in common, and ``random``: that of this rank, or empty.

    Raises:
        StateMismatch: it is of another model or optimizer.
    """
    user, manager, tensors = state["user"], state["manager"], held.tensors
    model, optim = user["model"], user["optim"]
    group_of = {name: number for number, group in enumerate(optim["param_groups"]) for name in group["params"]}
    missing, rest = set(tensors.names) - set(model), set(group_of) - set(tensors.names)
    if missing or rest:
        name, where = (min(missing), "build()") if missing else (min(rest), "the checkpoint")
        raise StateMismatch(f"build() returns another model than that of the checkpoint: only {where} has {name!r}")
    given = {
        name: _of_parameter(model[name], optim["state"].get(name, {}), group_of.get(name)) for name in tensors.names
    }
    options = [{key: value for key, value in group.items() if key != "params"} for group in optim["param_groups"]]
    tensors.load([given], options)
    tensors.load_buffers({name: model[name] for name in tensors.buffers() if name in model})
    held.state = State(int(manager["step"]), lineages.loaded(manager["lineage"]))
    return {"shared": user["shared"], "random": state["rank"]["random"] if same_rank else {}}


def _of_parameter(parameter: torch.Tensor, state: Mapping[str, Any], group: int | None) -> dict[str, Any]:
    """Return what ``RankState.load`` takes."""
    return {
        "parameter": local(parameter),
        "group": group,
        "state": {key: local(one) if isinstance(one, torch.Tensor) else one for key, one in state.items()},
        "spread": spread_of(state, parameter),
    }
