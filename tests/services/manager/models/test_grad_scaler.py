"""A GradScaler around a wrapped optimizer: one scale and the same skipped updates in all groups."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from keepstep import DistributedDataParallel, Manager, Optimizer
from tests.services.manager.groups import manager, together

Seen = dict[tuple[int, int], tuple[list[float], dict[str, Any]]]
"""Weights and the scaler's state at each (step, lineage)."""


class Trainer:
    """A group that trains with a scaler, which heals with the rest of the state."""

    def __init__(
        self, m: Manager, model: nn.Module, sgd: torch.optim.Optimizer, scaler: GradScaler, *, quantize: bool
    ) -> None:
        self.manager, self.model, self.scaler = m, model, scaler
        self.ddp = DistributedDataParallel(m, model, should_quantize=quantize)
        self.optimizer = Optimizer(m, sgd)

    def step(self, x: torch.Tensor, clip: bool = False) -> bool:
        self.optimizer.zero_grad()
        self.scaler.scale(self.ddp(x).sum()).backward()
        if clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.5)
        stepped = self.scaler.step(self.optimizer)
        self.scaler.update()
        return bool(stepped)

    def facts(self) -> tuple[tuple[int, int], tuple[list[float], dict[str, Any]]]:
        state = self.manager.state_dict()
        weights = [value for parameter in self.model.parameters() for value in parameter.flatten().tolist()]
        return (state["step"], state["lineage"]), (weights, self.scaler.state_dict())


@contextmanager
def trainer(
    lighthouse: str,
    name: str,
    growth_interval: int = 1000,
    *,
    features: int = 4,
    init_scale: float = 4.0,
    quantize: bool = False,
    **options: Any,
) -> Iterator[Trainer]:
    torch.manual_seed(0)
    model = nn.Linear(features, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scaler = GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    parts = {"model": model, "sgd": sgd, "scaler": scaler}

    def load(state: dict[str, Any]) -> None:
        for key, part in parts.items():
            part.load_state_dict(state[key])

    with manager(lighthouse, name, **options) as m:
        m.set_state_dict_fns(load, lambda: {key: part.state_dict() for key, part in parts.items()})
        yield Trainer(m, model, sgd, scaler, quantize=quantize)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("x", [1.0, float("inf")], ids=["finite", "overflow"])
def test_alone_a_group_trains_as_torch_does(lighthouse, fused, x):
    def weights_and_scale(m: Manager | None) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        if m is not None:
            optimizer = Optimizer(m, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 4), x)).sum()).backward()
            stepped = scaler.step(optimizer)
            if m is not None:
                assert stepped is (x == 1.0)
            scaler.update()
        return model.weight.flatten().tolist(), scaler.state_dict()

    with manager(lighthouse, "a") as m:
        ours = weights_and_scale(m)
        assert m.current_step() == 3  # one whose gradients overflowed counts too
    torchs = weights_and_scale(None)
    assert ours[0] == pytest.approx(torchs[0])
    assert ours[1] == torchs[1]


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_a_joiner_takes_over_the_scale_before_it_uses_it(lighthouse, clip):
    ahead, joined, end = threading.Event(), threading.Event(), threading.Barrier(2)
    last = {"step": 1000}

    def train(t: Trainer, seen: Seen) -> None:
        while t.manager.current_step() < last["step"]:
            if t.step(torch.ones(1, 4), clip):
                key, facts = t.facts()
                seen[key] = facts
                if t.manager.replica_id().startswith("b:") and len(seen) == 1:
                    last["step"] = key[0] + 3
        end.wait(30)

    def veteran() -> Seen:
        seen: Seen = {}
        with trainer(lighthouse, "a", growth_interval=3) as t:
            while t.manager.current_step() < 4:
                assert t.step(torch.ones(1, 4), clip)
            ahead.set()
            assert joined.wait(30)
            train(t, seen)
        return seen

    def joiner() -> Seen:
        seen: Seen = {}
        assert ahead.wait(30)
        with trainer(lighthouse, "b", growth_interval=3) as t:
            joined.set()
            train(t, seen)
        return seen

    a, b = together(veteran, joiner)
    assert len(b) == 4
    assert b == {key: a[key] for key in b}


def test_all_groups_skip_a_step_that_overflows_in_one(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, x: float) -> tuple[Any, ...]:
        with trainer(lighthouse, name, min_replica_size=2) as t:
            ready.wait(30)
            assert t.step(torch.ones(1, 4))
            _, (before, _) = t.facts()
            assert t.step(torch.full((1, 4), x)) is False
            key, (after, scaler) = t.facts()
            ready.wait(30)
            return key[0], after == before, scaler["scale"]

    assert together(lambda: group("a", 1.0), lambda: group("b", float("inf"))) == [(2, True, 2.0)] * 2


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_what_overflows_float16_in_one_group_is_skipped_by_all_that_quantize(lighthouse, clip):
    """The gradient of group b is four times the scale, and float16 ends at 65504. Elements of other rows are finite."""
    ready = threading.Barrier(2)
    features = 700

    def group(name: str, x: float) -> list[tuple[bool, float, list[float]]]:
        seen = []
        inputs = torch.ones(1, features)
        inputs[0, 300] = x
        with trainer(lighthouse, name, features=features, init_scale=32768.0, quantize=True, min_replica_size=2) as t:
            for _ in range(4):
                ready.wait(30)
                with torch.autocast("cpu", dtype=torch.float16):
                    stepped = t.step(inputs, clip)
                assert clip or t.model.weight.grad[0, 600].isfinite()  # clipping makes all of them NaN
                _, (weights, scaler) = t.facts()
                seen.append((stepped, scaler["scale"], weights))
            ready.wait(30)
        return seen

    ours, theirs = together(lambda: group("a", 1.0), lambda: group("b", 4.0))
    assert ours == theirs
    assert [(stepped, scale) for stepped, scale, _ in ours] == [
        *((False, 16384.0), (False, 8192.0)),
        *((True, 8192.0), (True, 8192.0)),
    ]
    first, second, third, _ = (weights for _, _, weights in ours)
    assert first == second != third


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_a_discarded_step_leaves_the_scale_as_it_is(lighthouse, clip):
    ready = threading.Barrier(2)

    def group(name: str, x: float) -> Seen:
        seen: Seen = {}
        with trainer(lighthouse, name, growth_interval=2, min_replica_size=2) as t:
            ready.wait(30)
            assert t.step(torch.ones(1, 4), clip)
            _, before = t.facts()
            # nothing of it is averaged: only one of them finds an infinity
            t.optimizer.zero_grad()
            t.manager.wait_quorum()
            ready.wait(30)
            t.manager.report_error(RuntimeError("a peer died"))
            t.scaler.scale(t.ddp(torch.full((1, 4), x)).sum()).backward()
            if clip:
                t.scaler.unscale_(t.optimizer)
            assert t.scaler.step(t.optimizer) is False
            t.scaler.update()
            assert t.facts()[1] == before
            ready.wait(30)
            while len(seen) < 3:
                if t.step(torch.ones(1, 4), clip):
                    key, facts = t.facts()
                    seen[key] = facts
            ready.wait(30)
            return seen

    a, b = together(lambda: group("a", 1.0), lambda: group("b", float("inf")))
    assert a == b
    assert {facts["scale"] for _, facts in a.values()} == {8.0, 16.0}


SCALED_STEP = """
import sys, torch, warnings
warnings.simplefilter("error", FutureWarning)
from keepstep import Manager, Optimizer, ProcessGroupGloo
manager = Manager(ProcessGroupGloo(), lighthouse_addr=sys.argv[1], replica_id="a")
model = torch.nn.Linear(1, 1)
optimizer, scaler = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1)), torch.amp.GradScaler("cpu")
optimizer.zero_grad()
scaler.scale(model(torch.ones(1, 1)).sum()).backward()
assert scaler.step(optimizer)
scaler.update()
manager.shutdown()
"""


def test_torch_warns_of_nothing(lighthouse):
    command = [sys.executable, "-c", SCALED_STEP, lighthouse]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_scaler_that_does_not_pass_itself_is_a_clear_error(lighthouse):
    class Scaler(GradScaler):
        """As torch says that it will be."""

        def step(self, optimizer: torch.optim.Optimizer) -> Any:
            optimizer.grad_scale, optimizer.found_inf = self._get_scale_async(), torch.zeros(())
            return optimizer.step()

    with trainer(lighthouse, "a") as t:
        t.scaler = Scaler("cpu")
        with pytest.raises(RuntimeError, match="does not pass itself"):
            t.step(torch.ones(1, 4))


def test_gradients_that_the_script_unscales_with_the_optimizer_inside_are_a_clear_error(lighthouse):
    """``step`` would unscale them again."""
    with trainer(lighthouse, "a") as t:
        t.optimizer.zero_grad()
        t.scaler.scale(t.ddp(torch.ones(1, 4)).sum()).backward()
        t.scaler.unscale_(t.optimizer.optim)
        with pytest.raises(RuntimeError, match=r"pass the keepstep\.Optimizer around it"):
            t.scaler.step(t.optimizer)


def test_a_scaler_and_a_manager_that_refuses_infinities_exclude_each_other(lighthouse):
    with trainer(lighthouse, "a", refuse_nonfinite=True) as one, pytest.raises(ValueError, match="use one of the two"):
        one.step(torch.ones(1, 4))


def test_an_overflow_that_a_scaler_expects_is_not_reported(lighthouse):
    with manager(lighthouse, "a") as m:
        model = nn.Linear(4, 1, bias=False)
        optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=0.1))
        ddp, scaler = DistributedDataParallel(m, model), GradScaler("cpu")
        for _ in range(2):  # the second request reports the first step
            optimizer.zero_grad()
            scaler.scale(ddp(torch.full((1, 4), float("inf"))).sum()).backward()
            assert not scaler.step(optimizer)
            scaler.update()
    with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default/events", timeout=30) as answer:
        kinds = {one["kind"] for one in json.load(answer)["events"]}
    assert "quorum" in kinds
    assert "nonfinite" not in kinds
