"""Groups compare what equal weights follow from: their optimizers in each step, and the arithmetic of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer
from keepstep.local_sgd import DiLoCo, LocalSGD
from keepstep.runtime.exits import MismatchExit
from tests.services.manager.groups import manager, refusal, together

RATE = 0.1
DISTINCT = {"r0": 1.0, "r1": 2.0, "r2": 4.0}


class Trainer:
    """A group whose script computes the learning rate itself, before each step."""

    def __init__(self, m: Manager, rate: Callable[[int], float]) -> None:
        torch.manual_seed(0)
        self.manager, self.rate = m, rate
        self.model = nn.Linear(3, 1)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        m.register_state_dict_fn("model", self.model.load_state_dict, self.model.state_dict)
        m.register_state_dict_fn("inner", self.inner.load_state_dict, self.inner.state_dict)
        self.ddp, self.optimizer = DistributedDataParallel(m, self.model), Optimizer(m, self.inner)

    def train(self, steps: int, scale: float) -> list[float]:
        while self.manager.current_step() < steps:
            self.inner.param_groups[0]["lr"] = self.rate(self.manager.current_step())
            self.optimizer.zero_grad()
            self.ddp(torch.full((1, 3), scale)).sum().backward()
            self.optimizer.step()
        self.manager.finish()
        return [one for parameter in self.model.parameters() for one in parameter.flatten().tolist()]


def train_three(lighthouse: str, odd: Callable[[int], float], steps: int = 8) -> list[Any]:
    """Return the weights of each group at the end, or why it was refused. ``odd``: learning rate of r1 by step."""
    connected = threading.Barrier(3)

    def group(name: str) -> Any:
        with manager(lighthouse, name, min_replica_size=2) as m:
            trainer = Trainer(m, odd if name == "r1" else lambda step: RATE / (1 + step))
            connected.wait(30)
            try:
                return trainer.train(steps, DISTINCT[name])
            except MismatchExit as error:
                return str(error)

    return together(*(lambda name=name: group(name) for name in DISTINCT))


def test_of_three_groups_the_one_that_keeps_another_learning_rate_is_refused_with_both_values(lighthouse, caplog):
    r0, r1, r2 = train_three(lighthouse, lambda _step: 0.07)
    assert r0 == r2
    assert "the optimizers of r1 stepped with other values than those of r0, r2 in the step after step" in r1
    assert "again after a heal; SGD param group 0 lr: 0.07 here, 0.0" in r1
    told = [one for one in caplog.records if "optimizers stepped with other values" in one.getMessage()]
    assert told, "the first time it heals, and its trainer learns what differs"


def test_a_group_whose_frozen_parameters_differ_and_are_not_registered_is_refused_and_named(lighthouse):
    connected = threading.Barrier(3)

    def group(name: str) -> str:
        model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 1))  # a base, and an adapter
        for parameter in model[0].parameters():
            parameter.fill_(0.1 if name == "r2" else 0.2)  # groups are threads, which share the seed of torch
        adapter, sgd = model[1], torch.optim.SGD(model[1].parameters(), lr=RATE)
        with manager(lighthouse, name, min_replica_size=2) as m:
            m.register_state_dict_fn("adapter", adapter.load_state_dict, adapter.state_dict)
            ddp, optimizer = DistributedDataParallel(m, model), Optimizer(m, sgd)
            connected.wait(30)
            try:
                while m.current_step() < 8:
                    optimizer.zero_grad()
                    ddp(torch.full((1, 3), DISTINCT[name])).sum().backward()
                    optimizer.step()
                m.finish()
            except MismatchExit as error:
                return str(error)
            return str(adapter.state_dict())

    r0, r1, r2 = together(*(lambda name=name: group(name) for name in DISTINCT))
    assert r0 == r1
    assert "again after a heal; frozen parameters that are not registered: 2 with digest " in r2


def test_a_group_that_steps_once_with_another_learning_rate_heals_and_ends_with_equal_weights(lighthouse):
    r0, r1, r2 = train_three(lighthouse, lambda step: 0.07 if step == 3 else RATE / (1 + step))
    assert r0 == r1 == r2


def test_a_group_with_another_learning_rate_in_the_last_step_ends_with_equal_weights(lighthouse):
    r0, r1, r2 = train_three(lighthouse, lambda step: 0.07 if step == 7 else RATE / (1 + step))
    assert r0 == r1 == r2


def _trained(order: Callable[[list[nn.Parameter]], list[nn.Parameter]], wrap: Callable[..., object]) -> Any:
    def build(m: Manager) -> object:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return model, wrap(m, model, torch.optim.AdamW(order(list(model.parameters()))))

    return build


def _with_ddp(m: Manager, model: nn.Module, inner: torch.optim.Optimizer) -> object:
    return DistributedDataParallel(m, model), Optimizer(m, inner)


def _with_the_optimizer_first(m: Manager, model: nn.Module, inner: torch.optim.Optimizer) -> object:
    return Optimizer(m, inner), DistributedDataParallel(m, model)


def _with_local_sgd(m: Manager, model: nn.Module, inner: torch.optim.Optimizer) -> object:
    return LocalSGD(m, model, inner, 2)


@pytest.mark.parametrize("wrap", [_with_ddp, _with_the_optimizer_first, _with_local_sgd])
def test_a_group_whose_optimizer_has_the_parameters_in_another_order_is_refused(lighthouse, wrap):
    usual, odd = _trained(list, wrap), _trained(lambda every: [every[2], every[1], every[0], every[3]], wrap)
    assert "here 'AdamW param group 0: 1.weight', in a 'AdamW param group 0: 0.weight'" in refusal(
        lighthouse, usual, odd
    )


def test_diloco_compares_the_order_of_both_optimizers_and_the_values_of_the_outer_one(lighthouse):
    def build(m: Manager) -> None:
        model = nn.Linear(3, 1)
        outer = torch.optim.SGD(model.parameters(), lr=0.7)
        DiLoCo(m, [model], torch.optim.AdamW(model.parameters()), outer, 2)
        (title, lines), _ = m.script_checker.common.of_step()
        assert title == "SGD param group 0"
        assert "lr\t0.7" in lines.splitlines()

    with manager(lighthouse, "a", use_async_quorum=False) as m:
        build(m)
        assert m.script_checker.common.take_new()[0] == [
            ["SGD param group 0: fragment 0 weight", "SGD param group 0: fragment 0 bias"]
        ]


SCRIPT = """
import sys, torch
from torch import nn
from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
manager = Manager(ProcessGroupGloo(), lighthouse_addr=sys.argv[1], replica_id="b")
model = nn.Linear(3, 1)
wrapped = DistributedDataParallel(manager, model), Optimizer(manager, torch.optim.SGD(model.parameters()))
exec(sys.argv[2])
manager.start_quorum()
print("let in")
"""
THREADS = 1
"""As tests/conftest.py sets it."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("act", "variables", "named"),
    [
        ("", {"ATEN_CPU_CAPABILITY": "default"}, "setting ATEN_CPU_CAPABILITY: DEFAULT in b, AVX"),
        (f"torch.set_num_threads({THREADS + 1})", {}, f"setting OMP_NUM_THREADS: {THREADS + 1} in b, {THREADS} in a"),
        ("torch.set_flush_denormal(True)", {}, "setting flush_denormal: True in b, False in a"),
        ("torch.use_deterministic_algorithms(True)", {}, "setting use_deterministic_algorithms: True in b, False in a"),
        ("torch.set_float32_matmul_precision('medium')", {}, "setting mkldnn.matmul.fp32_precision: bf16 in b, none"),
    ],
    ids=["capability", "threads", "denormal", "deterministic", "matmul"],
)
def test_a_process_that_computes_in_another_way_is_refused_with_the_fact_named(lighthouse, act, variables, named):
    """A real process for each fact. A forked one has read the variables of torch already: there Python starts again."""
    if "ATEN_CPU_CAPABILITY" in variables and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has one capability")
    environment, flags = {"OMP_NUM_THREADS": str(THREADS), **variables}, ["-u"] if variables else []
    with manager(lighthouse, "a") as m:
        Trainer(m, lambda _: RATE)
        m.start_quorum()
        assert m.should_commit()
        refused = subprocess.run(
            [sys.executable, *flags, "-c", SCRIPT, lighthouse, act],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert (refused.returncode, refused.stdout) == (78, ""), refused.stderr
    assert f"this group does not fit its job: {named}" in refused.stderr
