"""The device mesh over ranks and groups, and the gradients of a sharded model, in a world of one rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from keepstep.device_mesh import ManagedDeviceMesh, average_over_groups, ft_init_device_mesh
from keepstep.process_group import ProcessGroupDummy
from keepstep.process_group.works import CompletedWork
from tests.support.models.manager_double import ManagerDouble


class ThreeGroups(ManagerDouble):
    """A manager whose average over three groups is a third of this group's values: the others contribute zeros."""

    def __init__(self) -> None:
        super().__init__(rank=2)
        self.reduced = 0

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any = ReduceOp.AVG) -> Work:
        assert reduce_op == ReduceOp.AVG
        self.reduced += 1
        tensor.div_(3)
        return CompletedWork(tensor)

    def num_participants(self) -> int:
        return 3


@pytest.fixture
def world() -> Iterator[None]:
    """Not with torch's Gloo: FSDP makes torch keep the world, sockets and all."""
    dist.Backend.register_backend("mesh-world", lambda *_: ProcessGroupDummy(), devices=["cpu"])
    dist.init_process_group("mesh-world", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh_of(manager: Any, **changes: Any) -> ManagedDeviceMesh:
    arguments: dict[str, Any] = {
        "device_type": "cpu",
        "mesh_shape": (2, 1, 1),
        "mesh_dim_names": ("dp_replicate", "dp_shard", "tp"),
        "replicate_dim": 0,
    }
    return ft_init_device_mesh(manager=manager, **{**arguments, **changes})


def shard_rows(layer: nn.Module, mesh: Any) -> None:
    """Shard the parameters as tensor parallelism does; its own function needs a collective of the world."""
    for name, parameter in list(layer.named_parameters()):
        sharded = DTensor.from_local(parameter.detach(), mesh, [Shard(0)])
        layer.register_parameter(name, nn.Parameter(sharded))


def test_a_mesh_has_the_groups_as_one_dimension(world) -> None:
    manager = ThreeGroups()
    mesh = mesh_of(manager)
    assert (mesh.ndim, mesh.shape, mesh.size(), mesh.device_type) == (3, (3, 1, 1), 3, "cpu")
    assert [mesh.size(name) for name in mesh.mesh_dim_names] == [mesh.size(index) for index in range(3)] == [3, 1, 1]
    assert (mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("tp")) == (2, 0)
    assert isinstance(mesh["dp_shard"], DeviceMesh)
    assert mesh["dp_shard", "tp"].shape == (1, 1)
    both = mesh["dp_replicate", "dp_shard"]
    assert isinstance(both, ManagedDeviceMesh)
    assert (both.mesh_dim_names, both.shape) == (("dp_replicate", "dp_shard"), (3, 1))
    tensor = torch.tensor([6.0])
    dist.all_reduce(tensor, ReduceOp.AVG, group=mesh["dp_replicate"].get_group())
    assert tensor.item() == 2
    dist.all_reduce(tensor, group=mesh.get_group("dp_shard"))
    assert (tensor.item(), manager.reduced) == (2, 1)
    with pytest.raises(KeyError, match="no dimension 'pp' in this mesh; it has dp_replicate, dp_shard, tp"):
        mesh["pp"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mesh_shape": (2, 1)}, "do not fit: give one name"),
        ({"replicate_dim": 3}, "do not fit: give one name"),
        ({"mesh_shape": (2, 2, 1)}, "need 2 ranks, and this group has 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(world, changes, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        mesh_of(ThreeGroups(), **changes)


def test_gradients_of_a_sharded_model_are_averaged_over_the_groups(world) -> None:
    manager = ThreeGroups()
    torch.manual_seed(0)
    plain, model = nn.Linear(3, 2), nn.Linear(3, 2)
    model.load_state_dict(plain.state_dict())
    fully_shard(model, mesh=mesh_of(manager)["dp_shard"])
    average_over_groups(model, manager)  # type: ignore[arg-type]
    for one in (plain, model):
        one(torch.ones(4, 3)).square().sum().backward()
    for expected, sharded in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.to_local(), expected.grad / 3)
    assert manager.layout == [
        "sharded module '' reduces the dtype of its parameters",
        "weight (2, 3) torch.float32 S(0) over dp_shard=1, shard at (0, 0)",
        "bias (2,) torch.float32 S(0) over dp_shard=1, shard at (0,)",
    ]
    assert manager.script_checker.trained() == [model], "the Manager warns of parameters that are not registered"


def test_a_model_whose_parameters_a_load_replaced_is_averaged(world) -> None:
    """As ``from_pretrained`` of Transformers and ``cpu_ram_efficient_loading`` of Accelerate do."""
    manager = ThreeGroups()
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=mesh_of(manager)["dp_shard"])
    model.load_state_dict({name: one.detach().clone() for name, one in model.state_dict().items()}, assign=True)
    average_over_groups(model, manager)  # type: ignore[arg-type]
    model(torch.ones(4, 3)).sum().backward()
    torch.testing.assert_close(model.bias.grad.to_local(), torch.full((2,), 4 / 3))


class Routed(nn.Module):
    """Each sample goes through one of the experts, and through a layer for all."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.shared(x))


def test_parameters_on_two_meshes_in_one_sharded_module_are_averaged_all(world) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(fsdp, "ShardPlacementResult"):
        pytest.skip("this torch shards a module over one mesh only")
    manager = ThreeGroups()
    torch.manual_seed(0)
    plain, model = Routed(), Routed()
    model.load_state_dict(plain.state_dict())
    mesh = mesh_of(manager)
    other = DeviceMesh.from_group(dist.new_group([0]), "cpu", mesh_dim_names=("experts",))  # with ranks of its own
    of_experts = fsdp.ShardPlacementResult(Shard(0), fsdp.FSDPMeshInfo(other, shard_mesh_dim=0))
    experts = {*model.experts.parameters()}
    fully_shard(model, mesh=mesh["dp_shard"], shard_placement_fn=lambda one: of_experts if one in experts else None)
    average_over_groups(model, manager)  # type: ignore[arg-type]
    for one in (plain, model):
        one(torch.ones(4, 3), 1).square().sum().backward()
    for (name, expected), sharded in zip(plain.named_parameters(), model.parameters(), strict=True):
        if expected.grad is None:
            assert sharded.grad is None, name
        else:
            torch.testing.assert_close(sharded.grad.to_local(), expected.grad / 3)
    assert manager.reduced == 2
    assert manager.layout[:2] == [
        "sharded module '' reduces the dtype of its parameters",
        "sharded module '' mesh 1 reduces the dtype of its parameters",
    ]
    assert manager.layout[-1] == "experts.1.bias (3,) torch.float32 S(0) over experts=1, shard at (0,)"


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_a_pipeline_with_two_stages_on_a_rank_reduces_each_of_them_once_in_a_step(world, name: str) -> None:
    manager: Any = ThreeGroups()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    mesh = mesh_of(manager)
    stages = []
    for number, layer in enumerate(copy.deepcopy(plain)):
        fully_shard(layer, mesh=mesh["dp_shard"])
        average_over_groups(layer, manager)
        part = torch.empty(1, 3, requires_grad=True)
        stages.append(PipelineStage(layer, number, 2, torch.device("cpu"), part, part, group=mesh.get_group("tp")))
    schedule = get_schedule_class(name)(stages, 4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    schedule.step(x, target=y, losses=[])
    assert manager.reduced == 2
    nn.functional.mse_loss(plain(x), y).backward()
    for expected, stage in zip(plain, stages, strict=True):
        torch.testing.assert_close(stage.submod.weight.grad.to_local(), expected.weight.grad / 3)


def test_the_values_of_a_step_have_the_sharded_modules_that_it_reduced_in_their_order(world) -> None:
    manager = ThreeGroups()
    model = Routed()
    for unit in (*model.experts, model):
        fully_shard(unit, mesh=mesh_of(manager)["dp_shard"])
    average_over_groups(model, manager)  # type: ignore[arg-type]
    seen = []
    for expert in (0, 1):
        manager.script_checker.common.begin_step()
        model(torch.ones(4, 3), expert).sum().backward()
        seen.append(manager.script_checker.common.of_step()[0])
    assert seen == [
        ("all-reduce", f"1\tsharded module 'experts.{n}', 12 elements\n2\tsharded module '', 12 elements")
        for n in (0, 1)
    ]


def test_a_stage_without_trainable_parameters_is_averaged_as_it_is(world, caplog) -> None:
    manager: Any = ThreeGroups()
    average_over_groups(nn.Flatten(), manager)
    frozen = nn.Linear(3, 2).requires_grad_(False)
    fully_shard(frozen, mesh=mesh_of(manager)["dp_shard"])
    average_over_groups(frozen, manager)
    manager.script_checker.committed(1, 0.0, groups=3, collectives=0, synchronized=False)
    assert "no gradients averaged" not in caplog.text
    assert manager.layout[0] == "sharded module '' reduces the dtype of its parameters"


def test_the_layout_of_a_model_with_tensor_parallelism_has_both_shardings(world) -> None:
    manager = ThreeGroups()
    mesh = mesh_of(manager)
    model = nn.Linear(3, 2)
    shard_rows(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp_shard"])
    average_over_groups(model, manager)  # type: ignore[arg-type]
    assert manager.layout[1] == "weight (2, 3) torch.float32 S(0) S(0) over dp_shard=1 x tp=1, shard at (0, 0)"


def test_the_layout_has_what_decides_which_numbers_the_groups_add(world) -> None:
    manager = ThreeGroups()
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh_of(manager)["dp_shard"], mp_policy=policy)
    average_over_groups(model, manager)  # type: ignore[arg-type]
    assert manager.layout[:2] == [
        "sharded module '' reduces torch.float32",
        "sharded module '0' reduces torch.float32",
    ]
    assert manager.layout[3] == "0.bias (2,) torch.float32 frozen S(0) over dp_shard=1, shard at (0,)"


def test_a_model_that_is_not_sharded_whole_is_refused(world) -> None:
    manager: Any = ThreeGroups()
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no sharded module: call torch.distributed.fsdp.fully_shard"):
        average_over_groups(model, manager)
    fully_shard(model[0], mesh=mesh_of(manager)["dp_shard"])
    with pytest.raises(ValueError, match=r"2 parameters \(1.weight, 1.bias\) are in no sharded module"):
        average_over_groups(model, manager)
    shard_rows(model[1], mesh_of(manager)["tp"])
    with pytest.raises(ValueError, match=r"2 parameters \(1.weight, 1.bias\) are in no sharded module"):
        average_over_groups(model, manager)


def test_a_model_that_an_evaluation_left_gathered_is_refused_until_it_is_resharded(world) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    manager = ThreeGroups()
    with pytest.raises(ValueError, match=r"call model.reshard\(\) before this"):
        average_over_groups(model, manager)

    model.reshard()
    average_over_groups(model, manager)
    model(torch.ones(2, 4)).sum().backward()
    assert manager.reduced == 1


def test_a_replicated_dtensor_that_fully_shard_ignores_is_refused_also_if_it_is_unfrozen_later(world) -> None:
    manager: Any = ThreeGroups()
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    mesh = mesh_of(manager)["dp_shard"]
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh, [Replicate()]))
    fully_shard(model, mesh=mesh, ignored_params={model[1].weight})
    with pytest.raises(ValueError, match=r"1 parameters \(1.weight\) are in no sharded module"):
        average_over_groups(model, manager)
    model[1].weight.requires_grad_(False)
    parts: list[Any] = []
    manager.add_layout = parts.append
    average_over_groups(model, manager)
    assert parts[0].lines()
    model[1].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1 parameters \(1.weight\) are in no sharded module"):
        parts[0].lines()  # a Manager reads it before each step
