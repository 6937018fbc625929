"""HSDP: FSDP2 shards a model over the ranks of a group, and keepstep averages its gradients over the groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from keepstep.group.agreement import FixedLines
from keepstep.lifecycle.manager_like import as_manager
from keepstep.manager import Manager
from keepstep.process_group import ManagedProcessGroup
from keepstep.state.values.sharding import is_dtensor, sharding_of
from keepstep_mesh.text import listed

MAX_NAMED = 3
"""Parameters that an error names."""


def all_reduce_hook(manager: Manager, reduced: str = "") -> Callable[[torch.Tensor], None]:
    """Return a hook for ``FSDPModule.set_all_reduce_hook`` that averages gradients over the groups.

    FSDP2 calls it in the backward pass, or at the end of a step of a pipeline, with the gradient shard of each of its
    units after the reduce-scatter inside the group. An error fails the step and does not raise.

    Args:
        manager: the Manager of this rank.
        reduced: name of the unit. Groups compare the names of each step, with the sizes of the shards; empty: they do
            not.
    """

    def average(shard: torch.Tensor) -> None:
        if reduced:
            manager.script_checker.common.add_reduction(f"{reduced}, {shard.numel()} elements")
        manager.allreduce(shard).wait()

    return average


def average_over_groups(model: nn.Module, manager: Manager) -> None:
    """Average the gradients of an FSDP2 model over the groups, in each backward pass.

    Call it once, after ``fully_shard`` and before the first step; in a pipeline, once for each stage of this rank. The
    groups compare the sharded modules and the dtype of their reductions; names, shapes, dtypes, and sharding of the
    parameters; and the shard that each rank holds. A group that differs is refused. So is a group in which a step
    reduced the gradients of other sharded modules than in the other groups, once it has healed from that.

    Args:
        model: a model whose trainable parameters are all in modules that ``fully_shard`` has sharded, over any meshes
            of this group.
        manager: the Manager of this rank. With ``retry_allreduce`` the gradients must be reduced in the dtype of the
            parameters, and not in float16.

    Raises:
        ValueError: ``fully_shard`` was not called, a trainable parameter is in no sharded module, so that its gradient
            would not be averaged, or ``retry_allreduce`` cannot repeat its reduction. The next step raises it for a
            parameter that was frozen and is trainable by then.
    """
    sharded: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    units = _units(sharded)
    covered = {id(one) for unit in units.values() for one in unit.parameters()}
    outside = {name: one for name, one in model.named_parameters() if id(one) not in covered}
    if not sharded and any(one.requires_grad for one in outside.values()):
        raise ValueError("the model has no sharded module: call torch.distributed.fsdp.fully_shard on it first")
    _refuse_trainable(outside)
    manager = as_manager(manager)
    if manager.retry_allreduce:
        _check_repeatable(model, units)
    for name, unit in units.items():
        unit.set_hook(all_reduce_hook(manager, name))
    manager.script_checker.add_module(model)
    lines = [f"{name} reduces {unit.reduced_dtype or 'the dtype of its parameters'}" for name, unit in units.items()]
    lines += [_describe_parameter(name, one) for name, one in model.named_parameters()]
    manager.steps.add_layout(_ShardedLayout(lines, outside))


def _refuse_trainable(outside: dict[str, nn.Parameter]) -> None:
    """Raise ValueError if a parameter that is in no sharded module trains."""
    missed = [name for name, one in outside.items() if one.requires_grad]
    if missed:
        raise ValueError(
            f"{len(missed)} parameters ({listed(missed, MAX_NAMED)}) are in no sharded module, and their gradients "
            f"would not be averaged: call fully_shard on the whole model too, also where only tensor or expert "
            f"parallelism shards it (over a dimension of one rank), and freeze what its ignored_params name. "
            f"After a forward pass without a backward pass the root's parameters are gathered: call model.reshard() "
            f"before this"
        )


class _ShardedLayout(FixedLines):
    """The layout of a model, which is read before each step. Parameters outside of its modules may thaw later."""

    def __init__(self, lines: list[str], outside: dict[str, nn.Parameter]) -> None:
        super().__init__(lines)
        self._outside = outside

    def lines(self) -> list[str]:
        _refuse_trainable(self._outside)
        return super().lines()


class _Unit(NamedTuple):
    """What FSDP2 reduces at once: the parameters of a sharded module that are on one mesh."""

    module: Any
    group: Any
    """The part of torch's FSDP2 that has them."""
    alone: bool
    """Whether all parameters of the module are on this mesh."""

    @property
    def reduced_dtype(self) -> torch.dtype | None:
        """The dtype in which it reduces; None: that of its parameters."""
        policy = self.group.mp_policy
        return policy.reduce_dtype or policy.param_dtype  # type: ignore[no-any-return]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this unit. Those of ``ignored_params`` are in none.

        ``load_state_dict(assign=True)`` replaces parameters, which FSDP2 notices only in the next forward pass. A pass
        without a backward pass leaves gathered ones in their places, which do not train.
        """
        if not self.group.is_sharded:
            return [one.sharded_param for one in self.group.fsdp_params]
        places = [one._module_info for one in self.group.fsdp_params]  # noqa: SLF001
        return [getattr(one.module, one.param_name) for one in places]

    def set_hook(self, hook: Callable[[torch.Tensor], None]) -> None:
        if self.alone:
            self.module.set_all_reduce_hook(hook)
        else:  # the method above refuses several meshes
            self.group._all_reduce_hook = hook  # noqa: SLF001


def _units(sharded: dict[str, Any]) -> dict[str, _Unit]:
    """Return the units of these modules, by their names."""
    units: dict[str, _Unit] = {}
    seen: set[int] = set()  # modules that fully_shard got as a list have one unit
    for name, module in sharded.items():
        state = module._get_fsdp_state()  # noqa: SLF001  torch has no public name for it
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.11
            groups = [one for one in (state._fsdp_param_group,) if one is not None]  # noqa: SLF001
        for number, group in enumerate(groups):
            if id(group) not in seen:
                seen.add(id(group))
                units[f"sharded module {name!r}{f' mesh {number}' if number else ''}"] = _Unit(
                    module, group, len(groups) == 1
                )
    return units


def _check_repeatable(model: nn.Module, units: dict[str, _Unit]) -> None:
    """Require that FSDP2 takes the memory of each reduction as the gradient, and changes nothing in it afterwards."""
    names = {id(one): name for name, one in model.named_parameters()}
    for unit in units.values():
        for parameter in unit.parameters():
            dtype = unit.reduced_dtype or parameter.dtype
            if parameter.requires_grad and (dtype is not parameter.dtype or dtype is torch.float16):
                raise ValueError(
                    f"retry_allreduce cannot repeat the reduction of {names[id(parameter)]!r}: FSDP2 reduces it in "
                    f"{dtype}, and changes the result before it is the gradient, in {parameter.dtype}; reduce in the "
                    f"dtype of the parameters, but not in float16 (MixedPrecisionPolicy(reduce_dtype=...)), or make "
                    f"the Manager without retry_allreduce"
                )


def _describe_parameter(name: str, parameter: nn.Parameter) -> str:
    """Describe a parameter and this rank's shard of it: rank i averages with rank i, so both hold the same shard."""
    line = f"{name} {tuple(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ' frozen'}"
    if is_dtensor(parameter):
        sharding = sharding_of(parameter)
        names = sharding.mesh_names or ("mesh",) * len(sharding.mesh_shape)
        mesh = " x ".join(f"{dimension}={size}" for dimension, size in zip(names, sharding.mesh_shape, strict=True))
        line += f" {' '.join(sharding.placements)} over {mesh}, shard at {sharding.global_offset}"
    return line


class ManagedDeviceMesh:
    """A device mesh whose replicate dimension is the groups of the job. ``ft_init_device_mesh`` returns it.

    Index it with names: one name gives a ``DeviceMesh``; several names give a ``DeviceMesh``, or a
    ``ManagedDeviceMesh`` if the replicate dimension is among them.

    Args:
        inner: mesh of the ranks of this group.
        names: names of all dimensions, in order.
        replicate_name: name of the replicate dimension.
        manager: the Manager of this rank.
    """

    def __init__(self, inner: DeviceMesh, names: tuple[str, ...], replicate_name: str, manager: Manager) -> None:
        self.inner = inner
        self.mesh_dim_names = names
        self.replicate_dim_name = replicate_name
        self._manager = manager
        self._group = ManagedProcessGroup(manager)
        self._group.register(replicate_name)
        self._replicate = DeviceMesh.from_group(self._group, inner.device_type, mesh_dim_names=(replicate_name,))

    @property
    def device_type(self) -> str:
        """Type of the devices, such as ``"cuda"``."""
        return self.inner.device_type

    @property
    def ndim(self) -> int:
        """Number of dimensions, with the replicate dimension."""
        return len(self.mesh_dim_names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension; that of the replicate dimension changes with the quorum."""
        return tuple(self.size(name) for name in self.mesh_dim_names)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the size of a dimension, or the number of ranks of all dimensions."""
        if mesh_dim is None:
            return self._group.size() * self.inner.size()
        name = self._name(mesh_dim)
        return self._group.size() if name == self.replicate_dim_name else self.inner[name].size()

    def get_group(self, mesh_dim: int | str) -> dist.ProcessGroup:
        """Return the process group of a dimension; that of the replicate dimension goes through the Manager."""
        name = self._name(mesh_dim)
        return self._group if name == self.replicate_dim_name else self.inner.get_group(name)

    def get_local_rank(self, mesh_dim: int | str) -> int:
        """Return this rank's index in a dimension; in the replicate dimension 0 while the group does not take part."""
        name = self._name(mesh_dim)
        if name == self.replicate_dim_name:
            return self._manager.participating_rank() or 0
        return self.inner.get_local_rank(name)

    @overload
    def __getitem__(self, names: str) -> DeviceMesh: ...

    @overload
    def __getitem__(self, names: tuple[str, ...]) -> DeviceMesh | ManagedDeviceMesh: ...

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh | ManagedDeviceMesh:
        wanted = (names,) if isinstance(names, str) else names
        for name in wanted:
            self._name(name)
        rest = tuple(name for name in wanted if name != self.replicate_dim_name)
        if rest == wanted:
            return self.inner[wanted]
        if not rest:
            return self._replicate
        mesh = ManagedDeviceMesh.__new__(ManagedDeviceMesh)
        mesh.__dict__.update(self.__dict__, inner=self.inner[rest], mesh_dim_names=wanted)
        return mesh

    def _name(self, mesh_dim: int | str) -> str:
        if isinstance(mesh_dim, int) and mesh_dim in range(self.ndim):
            return self.mesh_dim_names[mesh_dim]
        if mesh_dim not in self.mesh_dim_names:
            raise KeyError(f"no dimension {mesh_dim!r} in this mesh; it has {', '.join(self.mesh_dim_names)}")
        return str(mesh_dim)

    def __repr__(self) -> str:
        return f"ManagedDeviceMesh({self.inner!r}, {self.replicate_dim_name} over the groups)"


def ft_init_device_mesh(
    *,
    device_type: str,
    mesh_shape: tuple[int, ...],
    mesh_dim_names: tuple[str, ...],
    replicate_dim: int,
    manager: Manager,
) -> ManagedDeviceMesh:
    """Make a device mesh of the ranks of this group, with the groups of the job as its replicate dimension.

    ``torch.distributed`` must be initialised with the ranks of this group alone.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        mesh_shape: size of each dimension. That of the replicate dimension is ignored: the quorum decides it.
        mesh_dim_names: name of each dimension.
        replicate_dim: index of the replicate dimension.
        manager: the Manager of this rank.

    Returns:
        The mesh. Pass ``mesh["dp_shard"]`` to ``fully_shard`` and the model to ``average_over_groups``.

    Raises:
        ValueError: ``mesh_shape``, ``mesh_dim_names`` and ``replicate_dim`` do not fit each other, or the group has
            another number of ranks.
    """
    if len(mesh_shape) != len(mesh_dim_names) or replicate_dim not in range(len(mesh_shape)):
        raise ValueError(
            f"mesh_shape {mesh_shape}, mesh_dim_names {mesh_dim_names} and replicate_dim {replicate_dim} do not fit: "
            "give one name for each dimension, and the index of one of them"
        )
    rest = [index for index in range(len(mesh_shape)) if index != replicate_dim]
    shape, names = tuple(mesh_shape[index] for index in rest), tuple(mesh_dim_names[index] for index in rest)
    if not rest:
        shape, names = (1,), ("",)
    ranks = torch.Size(shape).numel()
    if ranks != dist.get_world_size():
        raise ValueError(
            f"the dimensions {dict(zip(names, shape, strict=True))} need {ranks} ranks, and this group has "
            f"{dist.get_world_size()}: initialise torch.distributed with the ranks of this group alone"
        )
    inner = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return ManagedDeviceMesh(inner, mesh_dim_names, mesh_dim_names[replicate_dim], manager)
