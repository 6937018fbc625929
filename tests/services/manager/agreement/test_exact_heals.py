"""A group that healed holds the state of its source bit for bit, also where torch casts a state that it loads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer
from keepstep.local_sgd import DiLoCo
from tests.services.manager.groups import manager, together
from tests.support.services.relay_driver import relay_process

STEPS, JOINS_AT = 12, 4


class Momentum(torch.optim.Optimizer):
    """Keeps momentum in float32 for parameters of any dtype, as many optimizers of language models do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["momentum"], state["more"] = torch.zeros(one.shape), {"seen": torch.zeros(())}
                state["momentum"].mul_(0.97).add_(one.grad.float())
                state["more"]["seen"] += 0.1
                one.sub_((group["lr"] * state["momentum"]).to(one.dtype))


class Script:
    """A model in bfloat16, and its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(5, 3).bfloat16()
        self.optimizer = Momentum(self.model.parameters())
        for group in self.optimizer.param_groups:
            group["seed"] = 7  # any value of a group heals

    def begin(self, m: Manager, **how: Any) -> None:
        def load(state: dict[str, Any]) -> None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optim"])

        m.set_state_dict_fns(load, self.state)
        self.ddp, self.wrapped = DistributedDataParallel(m, self.model), Optimizer(m, self.optimizer, **how)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def train(self, m: Manager, until: int) -> None:
        while m.current_step() < until:
            self.wrapped.zero_grad()
            x = torch.linspace(-1, 1, 10).reshape(2, 5).bfloat16() * (1 + m.current_step() % 5)
            (self.ddp(x) ** 2).sum().backward()
            self.wrapped.step()

    def bits(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        moments = [(name, one.dtype, one.tolist()) for each in state.values() for name, one in _flat(each)]
        return [[one.tolist() for one in self.model.state_dict().values()], moments]


def _flat(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, one in state.items():
        found += _flat(one) if isinstance(one, dict) else [(name, one)]
    return found


def two_groups(lighthouse: str, options: Any, how: Any) -> list[Any]:
    """The states of a group that trains, and of one that joins it later."""
    reached, joined = threading.Event(), threading.Event()

    def first() -> Any:
        script = Script(1)
        with manager(lighthouse, "a", **options) as m:
            script.begin(m, **how)
            script.train(m, JOINS_AT)
            reached.set()
            assert joined.wait(60)
            script.train(m, STEPS)
            assert m.finish().groups == 2
        return script.bits()

    def second() -> Any:
        script = Script(2)
        assert reached.wait(60)
        with manager(lighthouse, "b", **options) as m:
            script.begin(m, **how)
            joined.set()
            script.train(m, STEPS)
            assert m.finish().groups == 2
        return script.bits()

    return together(first, second)


@pytest.mark.parametrize(
    ("options", "how"),
    [({}, {}), ({"heal_over_pg": True}, {}), ({"use_async_quorum": False}, {}), ({}, {"catch_up": True})],
    ids=["async", "over the process group", "sync", "catch up"],
)
def test_a_group_that_joins_has_the_optimizer_state_of_its_source_in_its_dtype(
    lighthouse: str, options: Any, how: Any, caplog: Any
) -> None:
    source, joiner = two_groups(lighthouse, options, how)
    assert joiner == source
    assert "state not restored" not in caplog.text


def test_the_outer_optimizer_of_a_fragment_heals_in_its_dtype(lighthouse: str) -> None:
    reached, joined, done = threading.Event(), threading.Event(), threading.Barrier(2)

    def group(name: str) -> Any:
        script = Script(ord(name))
        inner = torch.optim.SGD(script.model.parameters(), lr=0.02)
        assert name == "a" or reached.wait(60)
        with manager(lighthouse, name, use_async_quorum=False) as m:
            m.set_state_dict_fns(script.model.load_state_dict, script.model.state_dict)
            block = DiLoCo(m, [script.model], inner, script.optimizer, sync_every=2)
            if name == "b":
                joined.set()
            with block:
                while m.current_step() < STEPS:
                    x = torch.linspace(-1, 1, 10).reshape(2, 5).bfloat16() * (1 + m.current_step() % 5)
                    (script.model(x) ** 2).sum().backward()
                    inner.step()
                    inner.zero_grad()
                    if m.current_step() == JOINS_AT and not reached.is_set():
                        reached.set()
                        assert joined.wait(60)
            (fragment,) = block.state_dict()["fragments"]
            done.wait(60)
            return [fragment["original_parameters"]["weight"].tolist(), script.bits()[1]]

    one, other = together(lambda: group("a"), lambda: group("b"))
    assert one == other
    assert {dtype for _, dtype, _ in one[1]} == {torch.float32}


async def test_a_group_that_heals_through_a_relay_has_the_state_of_its_source(lighthouse: str, tmp_path: Path) -> None:
    async with relay_process("--data-dir", str(tmp_path / "relay"), "--lighthouse", lighthouse):
        source, joiner = await asyncio.to_thread(two_groups, lighthouse, {}, {})
    assert joiner == source


async def test_a_job_that_resumes_from_a_durable_checkpoint_trains_on_as_if_it_had_not_stopped(
    lighthouse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(until: int, seed: int, **options: Any) -> Any:
        script = Script(seed)
        with manager(lighthouse, "a", **options) as m:
            script.begin(m)
            script.train(m, until)
        return script.bits()

    async with relay_process("--data-dir", str(tmp_path / "relay")) as (_, url):
        at: dict[str, Any] = {"durable_relays": url, "durable_every": JOINS_AT}
        monkeypatch.setenv("KEEPSTEP_JOB", "whole")
        whole = await asyncio.to_thread(train, STEPS, 1)
        monkeypatch.setenv("KEEPSTEP_JOB", "resumed")
        await asyncio.to_thread(train, JOINS_AT + 1, 1, **at)
        assert await asyncio.to_thread(train, STEPS, 2, **at) == whole


def test_a_load_that_forgets_a_key_is_named_with_the_group_and_the_remedy(lighthouse: str, caplog: Any) -> None:
    reached, healed = threading.Event(), threading.Event()

    def group(name: str) -> None:
        state = {"w": torch.full((2,), float(ord(name))), "schedule": {"rate": 0.1 if name == "a" else 0.2}}

        def forgets(loaded: dict[str, Any]) -> None:
            state["w"] = loaded["w"]
            healed.set()

        assert name == "a" or reached.wait(60)
        with manager(lighthouse, name) as m:
            m.set_state_dict_fns(forgets, lambda: dict(state))
            while not healed.is_set():
                m.start_quorum()
                m.should_commit()
                reached.set()

    together(lambda: group("a"), lambda: group("b"))
    (line,) = [one for one in caplog.messages if one.startswith("state not restored")]
    assert "replica_id=b:" in line
    assert "1 values of the registered state differ from those that were loaded: default['schedule']['rate']" in line
    assert "let load_state_dict load everything that state_dict returns" in line


def test_a_part_that_is_not_compared_may_differ_after_a_load(lighthouse: str, caplog: Any) -> None:
    """As the place of a group within its step, and the folders of its callbacks."""
    reached, healed = threading.Event(), threading.Event()

    def group(name: str) -> None:
        state = {"w": torch.full((2,), float(ord(name)))}
        assert name == "a" or reached.wait(60)
        with manager(lighthouse, name, state) as m:
            m.register_state_dict_fn("place", lambda _: healed.set(), lambda: {"folder": name})
            m.compare_only(["default"])
            while not healed.is_set():
                m.start_quorum()
                m.should_commit()
                reached.set()

    together(lambda: group("a"), lambda: group("b"))
    assert "state not restored" not in caplog.text
