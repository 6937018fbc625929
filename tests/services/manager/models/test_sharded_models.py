"""FSDP2 models, compiled and checkpointed, averaged over two groups; the same for DistributedDataParallel.

Each group is a thread with a Manager over Gloo and a world of one rank, in which FSDP2 calls its hooks as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from keepstep import DistributedDataParallel, Manager, Optimizer, PureDistributedDataParallel
from keepstep.device_mesh import average_over_groups
from keepstep.process_group import ProcessGroupDummy
from keepstep.runtime.exits import MismatchExit
from tests.services.manager.groups import manager, together
from tests.services.manager.steps.test_retried_steps import RETRY, Lossy

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
"""torch.compile reads it."""

DEADLINE = 60
PASSES = {"a": [1.0, -2.0], "b": [3.0, 0.5]}
"""Inputs of each group, one for each micro-batch."""
UNITS = 3
"""Modules that are sharded and have parameters of their own."""


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one rank. Not with torch's Gloo: FSDP makes torch keep the world, sockets and all."""
    # torch.compile reads this. It keeps a module of an earlier test if two threads left their forward passes crosswise.
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    dist.Backend.register_backend("models-world", lambda *_: ProcessGroupDummy(), devices=["cpu"])
    dist.init_process_group("models-world", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.checkpointed = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


def network() -> nn.Sequential:
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            numbers = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.copy_(torch.sin(number + numbers).view_as(parameter))
    return model


def checkpointed(model: nn.Sequential) -> None:
    for block in model[:2]:
        block.checkpointed = True


def checkpoint_wrapped(model: nn.Sequential) -> None:
    for number in range(2):
        model[number] = checkpoint_wrapper(model[number])


def shard(m: Manager, model: nn.Sequential, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, **options)
    average_over_groups(model, m)
    return model


def replicate(m: Manager, model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(m, model)


def loss_of(model: nn.Module, value: float) -> torch.Tensor:
    return model(torch.linspace(value, value + 1, 12).view(3, 4)).square().mean()


def gradients(model: nn.Module) -> torch.Tensor:
    grads: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([(one.full_tensor() if hasattr(one, "full_tensor") else one).view(-1) for one in grads])


def expected(passes: int = 1) -> torch.Tensor:
    """The mean over the groups of what plain torch gives, accumulated over so many micro-batches."""
    of_groups = []
    for values in PASSES.values():
        model = network()
        for value in values[:passes]:
            loss_of(model, value).backward()
        of_groups.append(gradients(model))
    return torch.stack(of_groups).mean(0)


Passes = Callable[[nn.Module, list[float]], None]


def train(lighthouse: str, build: Callable[[Manager], nn.Module], passes: Passes) -> list[tuple[torch.Tensor, int]]:
    """Return the gradients and the number of all-reduces of two steps of both groups, whose weights do not change."""
    ready = threading.Barrier(2)

    def group(name: str) -> list[tuple[torch.Tensor, int]]:
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            model = build(m)
            ready.wait(DEADLINE)
            return [one_step(m, model, PASSES[name]) for _ in range(2)]

    def one_step(m: Manager, model: nn.Module, values: list[float]) -> tuple[torch.Tensor, int]:
        model.zero_grad()
        m.start_quorum()
        passes(model, values)
        assert m.steps.attempt is not None
        reduced = m.steps.attempt.collectives
        assert m.should_commit(), m.errored()
        return gradients(model), reduced

    return [step for steps in together(lambda: group("a"), lambda: group("b")) for step in steps]


def one_pass(model: nn.Module, values: list[float]) -> None:
    loss_of(model, values[0]).backward()


@pytest.mark.parametrize("form", [checkpointed, checkpoint_wrapped])
@pytest.mark.parametrize("wrap", [shard, replicate])
def test_a_model_with_activation_checkpoints_has_the_averaged_gradients_of_the_plain_one(lighthouse, wrap, form):
    def build(m: Manager) -> nn.Module:
        model = network()
        form(model)
        return wrap(m, model)

    for grads, reduced in train(lighthouse, build, one_pass):
        torch.testing.assert_close(grads, expected())
        assert reduced == (UNITS if wrap is shard else 1)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
@pytest.mark.parametrize("wrap", [shard, replicate])
def test_a_compiled_model_has_the_averaged_gradients_of_the_plain_one(lighthouse, wrap, whole):
    """With AOTAutograd and without inductor, whose first use takes a minute of compilation."""
    from torch._dynamo.testing import CompileCounterWithBackend  # a slow import, for no other file

    compiler = CompileCounterWithBackend("aot_eager")

    def build(m: Manager) -> nn.Module:
        model = network()
        checkpointed(model)
        if not whole:
            for block in model[:2]:
                block.compile(backend=compiler)
        wrapped = wrap(m, model)
        if whole:
            wrapped.compile(backend=compiler)
        return wrapped

    for grads, reduced in train(lighthouse, build, one_pass):
        torch.testing.assert_close(grads, expected())
        assert reduced == (UNITS if wrap is shard else 1)
    assert 0 < compiler.frame_count <= 2 * len(PASSES), "each block in each group at most once"


def without_reduction(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def with_reduce_scatter_only(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def with_reduction(model: Any, last: bool) -> None:
    """Reduce in every micro-batch."""


@pytest.mark.parametrize(
    ("accumulate", "all_reduces"),
    [(without_reduction, UNITS), (with_reduce_scatter_only, 2 * UNITS), (with_reduction, 2 * UNITS)],
)
def test_accumulated_gradients_are_averaged_however_they_are_accumulated(lighthouse, accumulate, all_reduces):
    def both(model: nn.Module, values: list[float]) -> None:
        for value in values:
            accumulate(model, value == values[-1])
            loss_of(model, value).backward()

    for grads, reduced in train(lighthouse, lambda m: shard(m, network()), both):
        torch.testing.assert_close(grads, expected(passes=2))
        assert reduced == all_reduces


def test_gradients_of_bfloat16_are_averaged_in_the_dtype_of_the_reduction(lighthouse):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dtypes = set()

    def build(m: Manager) -> nn.Module:
        average = m.allreduce
        m.allreduce = lambda tensor: dtypes.add(tensor.dtype) or average(tensor)
        return shard(m, network(), mp_policy=policy)

    results = [grads for grads, _ in train(lighthouse, build, one_pass)]
    assert dtypes == {torch.float32}
    for grads in results:
        assert grads.dtype is torch.float32
        assert grads.equal(results[0]), "equal in all groups, bit for bit"
        torch.testing.assert_close(grads, expected(), rtol=0.05, atol=0.05 * float(expected().abs().max()))


def test_a_step_of_a_sharded_model_is_retried_with_the_same_gradients(lighthouse):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for failures in (0, 1, 2):
        with manager(lighthouse, f"r{failures}", pg=Lossy(failures), **RETRY) as m:
            model = network()
            model[1].up.bias.requires_grad_(False)
            shard(m, model, mp_policy=policy)
            m.start_quorum()
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                loss_of(model, PASSES["a"][last]).backward()
            assert m.should_commit(), m.errored()
            assert m.steps.attempt.retries == failures
            found.append(gradients(model))
    assert found[0].abs().max() > 0
    assert all(one.equal(found[0]) for one in found)


@pytest.mark.parametrize("fails_in", [None, 0, 1])
def test_a_step_that_reduces_each_micro_batch_is_retried_in_the_first_pass_only(lighthouse, fails_in, caplog):
    """The script has the sum of the first pass when the second one fails."""
    found = []
    for failing in (None, fails_in):
        with manager(lighthouse, f"after {failing}", pg=Lossy(0), **RETRY) as m:
            model = shard(m, network())
            m.start_quorum()
            m.wait_quorum()
            for number, value in enumerate(PASSES["a"]):
                m._context.reconfigurer.pg.failures = int(number == failing)
                loss_of(model, value).backward()
            assert m.should_commit() == (failing != 1)
            found.append(gradients(model))
    assert ("step not retried" in caplog.text) == (fails_in == 1)
    assert fails_in == 1 or found[0].equal(found[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reductions_that_cannot_be_repeated_are_refused_with_retries(lighthouse, dtype):
    model = network()
    if dtype is torch.float16:
        model.half()
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    with (
        manager(lighthouse, "a", **RETRY) as m,
        pytest.raises(
            ValueError, match=rf"retry_allreduce cannot repeat the reduction of '0.up.weight': .* in {dtype}"
        ),
    ):
        shard(m, model, mp_policy=policy)


def test_all_groups_clip_by_the_norm_of_the_averaged_gradients(lighthouse):
    norms = []

    def clip(model: nn.Module, values: list[float]) -> None:
        one_pass(model, values)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1))

    results = [grads for grads, _ in train(lighthouse, lambda m: shard(m, network()), clip)]
    norm = expected().norm()
    assert len({float(one.full_tensor()) for one in norms}) == 1
    for one, grads in zip(norms, results, strict=True):
        torch.testing.assert_close(one.full_tensor(), norm)
        torch.testing.assert_close(grads, expected() * 0.1 / norm)


def test_an_fsdp_model_in_the_wrapper_that_would_average_nothing_is_refused_with_the_remedy(lighthouse):
    with manager(lighthouse, "a") as m:
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for wrapper in (DistributedDataParallel, PureDistributedDataParallel):
            with pytest.raises(ValueError, match=r"is a DTensor.*average_over_groups\(model, manager\)"):
                wrapper(m, model)


class Routed(nn.Module):
    """One of several experts, and a layer for all."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.shared(x))


def test_a_group_whose_steps_use_another_expert_of_the_same_size_is_refused_with_both_names(lighthouse, caplog):
    """The averages of such a step are those of different parameters, and no size tells."""
    ready = threading.Barrier(3)

    def group(name: str) -> str:
        with manager(lighthouse, name, min_replica_size=2) as m:
            torch.manual_seed(0)
            model: Any = Routed()
            for unit in (*model.experts, model):
                fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
            average_over_groups(model, m)
            m.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
            optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=0.01))
            ready.wait(DEADLINE)
            try:
                while m.current_step() < 8:
                    optimizer.zero_grad()
                    model(torch.ones(2, 4), 2 if name == "r1" else 1).sum().backward()
                    optimizer.step()
            except MismatchExit as error:
                return str(error)
            return ""

    r0, r1, r2 = together(*(lambda name=name: group(name) for name in ("r0", "r1", "r2")))
    assert (r0, r2) == ("", "")
    assert "again after a heal; all-reduce 1: sharded module 'experts.2', 20 elements here, " in r1
    assert "sharded module 'experts.1', 20 elements in r" in r1
    assert [one for one in caplog.records if "stepped with other values" in one.getMessage()], "at first it heals"


def test_experts_of_one_unit_are_averaged_although_each_group_uses_another_one(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, expert: int) -> list[torch.Tensor]:
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            torch.manual_seed(0)
            model: Any = Routed()
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            if not hasattr(model, "set_reduce_scatter_unused_params"):
                pytest.skip("before torch 2.13 the reductions of such groups have different sizes")
            model.set_reduce_scatter_unused_params(True)
            average_over_groups(model, m)
            ready.wait(DEADLINE)
            m.start_quorum()
            model(torch.ones(2, 4), expert).sum().backward()
            assert m.should_commit(), m.errored()
            return [one.grad.full_tensor() for one in model.parameters()]

    torch.manual_seed(0)
    plain = Routed()
    (plain(torch.ones(2, 4), 0).sum() / 2 + plain(torch.ones(2, 4), 1).sum() / 2).backward()
    means = [torch.zeros_like(one) if one.grad is None else one.grad for one in plain.parameters()]
    for grads in together(lambda: group("a", 0), lambda: group("b", 1)):
        torch.testing.assert_close(grads, means)
