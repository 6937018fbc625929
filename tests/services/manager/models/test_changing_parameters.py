"""Parameters that change while a script trains, and passes that torch's class does not average."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, PureDistributedDataParallel
from tests.services.manager.groups import manager, together, until_connected

DEADLINE = 60
BOTH = pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])


class Layers(nn.Module):
    """A backbone that trains from ``unfreeze_at`` on, and a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.backbone.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.backbone(x).tanh())


def one_step(m: Manager, ddp: Any, x: torch.Tensor) -> bool:
    m.start_quorum()
    ddp(x).square().sum().backward()
    return m.should_commit()


@BOTH
def test_a_group_that_starts_after_the_others_have_unfrozen_layers_joins(lighthouse, wrapper):
    unfrozen, joined, done = threading.Event(), threading.Barrier(3), threading.Barrier(3)

    def group(name: str, seed: int) -> tuple[list[float], int]:
        model = Layers(seed)
        if name == "c":  # before it connects: the first quorum of the others would wait for it
            assert unfrozen.wait(DEADLINE)
        with manager(lighthouse, name, min_replica_size=1) as m:
            optimizer = Optimizer(m, torch.optim.AdamW(model.parameters(), lr=0.1))
            state = {"model": model, "optimizer": optimizer}

            def load(saved: dict[str, Any]) -> None:
                for key, value in saved.items():
                    state[key].load_state_dict(value)

            m.set_state_dict_fns(load, lambda: {key: one.state_dict() for key, one in state.items()})
            ddp = wrapper(m, model)
            commits = 0
            if name == "c":
                joined.wait(DEADLINE)
            while m.current_step() < 14:
                model.backbone.requires_grad_(m.current_step() >= 3)
                optimizer.zero_grad()
                ddp(torch.full((2, 3), float(seed))).square().sum().backward()
                commits += optimizer.step()
                if m.current_step() == 6 and name != "c":
                    unfrozen.set()
                    joined.wait(DEADLINE)
            done.wait(DEADLINE)
            return [one.double().sum().item() for one in model.parameters()], commits

    (a, _), (b, _), (c, commits) = together(lambda: group("a", 1), lambda: group("b", 2), lambda: group("c", 3))
    assert a == b == c
    assert commits >= 2


@BOTH
def test_a_parameter_that_is_unfrozen_in_the_middle_of_a_step_is_named_and_averaged_from_the_next_step_on(
    lighthouse, wrapper
):
    ready = threading.Barrier(2)

    def group(name: str, scale: float) -> tuple[bool, str, list[float]]:
        model = Layers(0)
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ddp = wrapper(m, model)
            ready.wait(DEADLINE)
            m.start_quorum()
            model.backbone.requires_grad_(True)
            ddp(torch.full((1, 3), scale)).sum().backward()
            committed, why = m.should_commit(), str(m.errored())
            model.zero_grad()
            assert one_step(m, ddp, torch.full((1, 3), scale)), m.errored()
            ready.wait(DEADLINE)
            return committed, why, model.backbone.weight.grad.flatten().tolist()

    (committed, why, a), (_, _, b) = together(lambda: group("a", 1.0), lambda: group("b", 3.0))
    assert not committed
    assert "2 parameters (backbone.weight, backbone.bias) were unfrozen" in why
    assert a == b


def test_a_model_that_all_groups_wrap_later_trains(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, scale: float) -> list[float]:
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ddp = DistributedDataParallel(m, first)
            ready.wait(DEADLINE)
            assert one_step(m, ddp, torch.full((1, 1), scale)), m.errored()
            later = DistributedDataParallel(m, second)
            m.start_quorum()
            (ddp(torch.ones(1, 1)) + later(torch.full((1, 1), scale))).sum().backward()
            assert m.should_commit(), m.errored()
            ready.wait(DEADLINE)
            return [second.weight.grad.item()]

    assert together(lambda: group("a", 1.0), lambda: group("b", 3.0)) == [[2.0]] * 2


@BOTH
def test_two_backward_passes_over_one_graph_are_both_averaged(lighthouse, wrapper):
    ready = threading.Barrier(2)

    def group(name: str, scale: float) -> float:
        model = nn.Linear(1, 1, bias=False)
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ddp = wrapper(m, model)
            ready.wait(DEADLINE)
            m.start_quorum()
            loss = ddp(torch.full((1, 1), scale)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            assert m.should_commit(), m.errored()
            ready.wait(DEADLINE)
            return model.weight.grad.item()

    assert together(lambda: group("a", 1.0), lambda: group("b", 3.0)) == [4.0, 4.0]


def test_a_pass_of_the_inner_module_between_two_steps_stays_local(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, scale: float) -> float:
        model = nn.Linear(1, 1, bias=False)
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ddp = DistributedDataParallel(m, model)
            ready.wait(DEADLINE)
            for _ in range(2):
                assert one_step(m, ddp, torch.full((1, 1), scale)), m.errored()
                if name == "a":
                    model.zero_grad()
                    model(torch.full((1, 1), 7.0)).sum().backward()
                    assert model.weight.grad.item() == 7.0
                model.zero_grad()
            ready.wait(DEADLINE)
            return m.current_step()

    assert together(lambda: group("a", 1.0), lambda: group("b", 3.0)) == [2, 2]


@BOTH
def test_a_sparse_gradient_of_some_groups_reaches_all_and_one_of_none_stays_none(lighthouse, wrapper):
    ready = threading.Barrier(3)

    def group(name: str, rows: list[int] | None) -> list[Any]:
        model = nn.ModuleDict({one: nn.EmbeddingBag(5, 2, sparse=True, mode="sum") for one in ("used", "unused")})
        model.forward = lambda x: model["used"](x, torch.zeros(1, dtype=torch.int64))
        with manager(lighthouse, name, min_replica_size=3, init_sync=False) as m:
            ddp = wrapper(m, model)
            ready.wait(DEADLINE)
            m.start_quorum()
            if rows is None:
                with torch.enable_grad():
                    (ddp(torch.tensor([0])).sum() * 0).backward(inputs=[model["used"].weight])
            else:
                ddp(torch.tensor(rows)).sum().backward()
            assert m.should_commit(), m.errored()
            ready.wait(DEADLINE)
            gradient = model["used"].weight.grad
            assert gradient.is_sparse
            assert model["unused"].weight.grad is None
            return gradient.to_dense()[:, 0].tolist()

    groups = [lambda: group("a", [1, 1, 4]), lambda: group("b", [4]), lambda: group("c", None)]
    for result in together(*groups):
        assert result == pytest.approx([0, 2 / 3, 0, 0, 2 / 3])


@BOTH
@pytest.mark.parametrize(
    ("parameter", "why"),
    [
        (lambda: nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn)), "float8_e4m3fn, whose gradient cannot"),
        (lambda: nn.Parameter(torch.eye(2).to_sparse()), "has the layout torch.sparse_coo"),
    ],
    ids=["dtype", "layout"],
)
def test_a_parameter_whose_gradient_can_never_be_averaged_is_refused_when_it_is_wrapped(
    lighthouse, wrapper, parameter, why
):
    model = nn.Linear(1, 1)
    model.odd = parameter()
    with manager(lighthouse, "a") as m, pytest.raises(ValueError, match=f"parameter 'odd' .*{why}"):
        wrapper(m, model)


def test_an_option_that_reduces_gradients_beside_the_buckets_is_refused(lighthouse):
    model = nn.Linear(1, 1)
    delayed = {
        "delay_all_reduce_named_params": [("bias", model.bias)],
        "param_to_hook_all_reduce": model.weight,
    }
    with manager(lighthouse, "a") as m, pytest.raises(ValueError, match="delay_all_reduce_named_params is not supp"):
        DistributedDataParallel(m, model, **delayed)


def test_a_reentrant_checkpoint_whose_output_has_no_tensor_is_named_with_the_remedy(lighthouse):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> object:
            value = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
            return type("Answer", (), {"value": value})()

    with manager(lighthouse, "a") as m:
        ddp = DistributedDataParallel(m, Odd())
        m.start_quorum()
        with pytest.raises(RuntimeError, match=r"returned a Answer.*use_reentrant=False"):
            ddp(torch.ones(1, 1, requires_grad=True))


def insert(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(4, 4)
    model.insert(1, layer)
    optimizer.add_param_group({"params": layer.parameters()})


def cast(model: nn.Sequential, _optimizer: torch.optim.Optimizer) -> None:
    model.double()


@BOTH
@pytest.mark.parametrize("change", [insert, cast])
def test_a_group_that_starts_after_the_others_have_changed_parameters_of_its_model_changes_them_and_joins(
    lighthouse, wrapper, change
):
    changed, done = threading.Event(), threading.Barrier(2)
    final = 12

    def group(name: str) -> tuple[list[float], int]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        state: dict[str, Any] = {"model": model, "inner": inner}
        if name == "b":
            assert changed.wait(DEADLINE)
        with manager(lighthouse, name) as m:
            is_changed = False

            def load(saved: dict[str, Any]) -> None:
                for key, value in saved.items():
                    state[key].load_state_dict(value)

            m.set_state_dict_fns(load, lambda: {key: one.state_dict() for key, one in state.items()})
            ddp, optimizer = wrapper(m, model), Optimizer(m, inner)
            commits = 0
            while m.current_step() < final:
                if m.current_step() >= 3 and not is_changed:
                    change(model, inner)
                    is_changed = True
                optimizer.zero_grad()
                ddp(torch.ones(2, 3, dtype=model[0].weight.dtype)).square().sum().backward()
                commits += optimizer.step()
                if m.current_step() == 5 and not changed.is_set():
                    changed.set()
                    until_connected(lighthouse, "b", asked=True)
            done.wait(DEADLINE)
            return [one for p in model.parameters() for one in p.detach().flatten().tolist()], commits

    (weights_a, _), (weights_b, commits_b) = together(lambda: group("a"), lambda: group("b"))
    assert commits_b >= 1
    assert weights_a == weights_b
