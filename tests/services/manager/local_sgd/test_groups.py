"""LocalSGD and DiLoCo over real Managers: groups that join, that are lost in the middle, and that differ."""

from __future__ import annotations

import copy
import json
import re
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import Manager
from keepstep.collectives.codecs import TwoBit
from keepstep.local_sgd import DiLoCo, LocalSGD
from keepstep.runtime.exits import MismatchExit
from keepstep_mesh.errors import Drained, KeepstepError
from tests.services.manager.groups import events, manager, together, until_connected

DEADLINE = 60


class Trainer:
    """A group with a model, an inner optimizer, and a block of LocalSGD or DiLoCo."""

    def __init__(
        self,
        m: Manager,
        seed: int,
        *,
        local: bool = False,
        registered: Sequence[str] = ("model", "inner"),
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.manager = m
        self.random = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.inner_steps = 0
        for name in registered:
            part = getattr(self, name)
            m.register_state_dict_fn(name, part.load_state_dict, part.state_dict)
        self.block: Any
        if "codec" in options:
            options["codec"] = options["codec"]()
        if local:
            self.block = LocalSGD(m, self.model, self.inner, **{"sync_every": 4, **options})
        else:
            fragments = [self.model[0], self.model[1:]]
            outers = [torch.optim.SGD(one.parameters(), lr=0.7, momentum=0.9, nesterov=True) for one in fragments]
            self.block = DiLoCo(m, fragments, self.inner, outers, **{"sync_every": 8, **options})

    def evaluate(self) -> torch.Tensor:
        """Use the model without a step."""
        self.model.eval()
        with torch.inference_mode():
            result = self.model(torch.ones(2, 3))
        self.model.train()
        return result

    def step(self) -> None:
        self.inner_steps += 1
        batch = torch.randn(8, 3, generator=self.random)
        (self.model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        self.inner.step()
        self.inner.zero_grad()

    def until(self, outer_step: int) -> None:
        while self.manager.current_step() < outer_step:
            self.step()

    def shared(self) -> list[torch.Tensor]:
        """All that is equal in all groups after an outer step."""
        if isinstance(self.block, LocalSGD):
            return [one.detach().clone() for one in self.model.state_dict().values()]
        fragments = self.block.state_dict()["fragments"]
        return [
            one.clone()
            for fragment in fragments
            for one in (
                *fragment["original_parameters"].values(),
                *(state["momentum_buffer"] for state in fragment["outer_optimizer"]["state"].values()),
            )
        ]


KINDS = {
    "local-async": {"local": True},
    "local-sync": {"local": True, "use_async_quorum": False},
    "diloco": {"use_async_quorum": False},
    "diloco-streaming": {
        "use_async_quorum": False,
        "fragment_sync_delay": 2,
        "fragment_update_alpha": 0.5,
        "use_bucketization": True,
    },
    "diloco-quantized": {"use_async_quorum": False, "should_quantize": True, "fragment_sync_delay": 1},
    "diloco-two-bit": {"use_async_quorum": False, "codec": TwoBit, "fragment_sync_delay": 1},
}
OF_MANAGER = ("use_async_quorum", "min_replica_size", "timeout")


@contextmanager
def trainer(lighthouse: str, name: str, kind: str, **options: Any) -> Iterator[Trainer]:
    values = {**KINDS[kind], **options}
    of_manager = {key: values.pop(key) for key in OF_MANAGER if key in values}
    with manager(lighthouse, name, **of_manager) as m:
        until_connected(lighthouse, name)
        yield Trainer(m, ord(name[-1]), **values)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_joins_late_trains_on_from_the_state_of_another(lighthouse, kind, steps: Path) -> None:
    """It takes part in the first outer step after its start: it trains nothing on its own before."""
    trained, meet = threading.Event(), threading.Barrier(2)
    last: list[int] = []

    def first() -> list[torch.Tensor]:
        with trainer(lighthouse, "a", kind) as one, one.block:
            one.until(3)
            trained.set()
            while one.manager.num_participants() == 1:
                one.until(one.manager.current_step() + 1)
            last.append(one.manager.current_step() + 3)
            meet.wait(DEADLINE)
            one.until(last[0])
            meet.wait(DEADLINE)
            return one.shared()

    def second() -> list[torch.Tensor]:
        assert trained.wait(DEADLINE)
        with trainer(lighthouse, "b", kind) as one, one.block:
            one.evaluate()
            assert one.manager.current_step() >= 3, "it healed before it trained"
            if kind not in ("local-sync", "diloco"):  # these took an outer step at once
                one.until(one.manager.current_step() + 1)
            meet.wait(DEADLINE)
            one.until(last[0])
            meet.wait(DEADLINE)
            return one.shared()

    equal(*together(first, second))
    assert "discarded" not in events(steps)
    assert events(steps).count("healed") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_start_together_begin_with_equal_weights(lighthouse, kind, steps: Path) -> None:
    meet = threading.Barrier(2)
    seen: dict[str, list[torch.Tensor]] = {}

    def run(name: str) -> list[torch.Tensor]:
        with trainer(lighthouse, name, kind, min_replica_size=2) as one:
            meet.wait(DEADLINE)  # else one may begin alone
            with one.block:
                one.block.begin()
                seen[name] = [parameter.detach().clone() for parameter in one.model.parameters()]
                one.until(4)
                assert one.inner_steps == 16
                meet.wait(DEADLINE)
                return one.shared()

    equal(*together(lambda: run("a"), lambda: run("b")))
    equal(seen["a"], seen["b"])
    assert "discarded" not in events(steps)


@pytest.mark.parametrize("kind", ["local-async", "diloco"])
def test_a_group_that_starts_a_moment_later_is_in_the_first_outer_step(lighthouse, kind, steps: Path) -> None:
    entered, meet = threading.Event(), threading.Barrier(2)

    def run(name: str) -> list[torch.Tensor]:
        if name == "b":
            assert entered.wait(DEADLINE)
        with trainer(lighthouse, name, kind) as one:
            if name == "b":
                meet.wait(DEADLINE)
            with one.block:
                one.block.begin()
                if name == "a":
                    assert one.manager.num_participants() == 1
                    entered.set()
                    meet.wait(DEADLINE)
                    until_connected(lighthouse, "b", asked=True)
                one.until(1)
                assert one.manager.num_participants() == 2
                meet.wait(DEADLINE)
                return one.shared()

    equal(*together(lambda: run("a"), lambda: run("b")))
    assert "discarded" not in events(steps)


def test_a_block_that_is_left_before_its_first_outer_step_leaves_the_job_in_order(lighthouse, steps: Path) -> None:
    with trainer(lighthouse, "a", "diloco") as one:
        with one.block:
            one.step()
        assert not one.manager.steps.attempt.is_in_flight()
    assert "discarded" not in events(steps)


@pytest.mark.parametrize("delay", [0, 6])
def test_a_group_that_is_asked_to_leave_does_so_between_two_outer_steps_and_not_in_one(lighthouse, delay) -> None:
    options = {"sync_every": 16, "fragment_sync_delay": delay}
    with trainer(lighthouse, "a", "diloco", **options) as one, pytest.raises(Drained, match="SIGTERM"), one.block:
        for _ in range(3):
            one.step()
        one.manager._membership.request_leave("SIGTERM")
        one.until(2)
    assert (one.inner_steps, one.manager.current_step()) == ((4, 0) if not delay else (8, 1))


def test_a_group_that_restarts_from_its_own_checkpoint_keeps_its_error_feedback_unless_it_heals(lighthouse) -> None:
    """The state of the other group lets b train on: what it had left out of earlier steps is gone."""
    key, meet = "StreamingDiLoCoFragment_0", threading.Barrier(2)
    saved: dict[str, dict[str, Any]] = {}

    def parts(one: Trainer) -> dict[str, Any]:
        return {"model": one.model, "inner": one.inner, "block": one.block, "manager": one.manager}

    def first(name: str) -> None:
        with trainer(lighthouse, name, "diloco-two-bit", min_replica_size=2) as one, one.block:
            one.until(2)
            saved[name] = copy.deepcopy({part: value.state_dict() for part, value in parts(one).items()})
            meet.wait(DEADLINE)

    def again(name: str) -> list[torch.Tensor]:
        with trainer(lighthouse, name, "diloco-two-bit", min_replica_size=2) as one:
            for part, value in parts(one).items():
                if name == "a" or part != "manager":
                    value.load_state_dict(saved[name][part])
            before = one.block._codec.error(key)
            assert before[0].any()
            meet.wait(DEADLINE)
            with one.block:
                one.evaluate()
                after = one.block._codec.error(key)
                if name == "a":
                    equal(after, before)
                else:
                    assert (one.manager.current_step(), after) == (2, [])
                one.until(3)
                meet.wait(DEADLINE)
                return one.shared()

    together(lambda: first("a"), lambda: first("b"))
    equal(*together(lambda: again("a"), lambda: again("b")))


@pytest.mark.parametrize("kind", ["local-async", "local-sync", "diloco"])
def test_the_functions_of_the_state_may_use_the_name_that_the_block_binds(lighthouse, kind) -> None:
    """The first forward pass in the block sees the weights of the job."""
    meet = threading.Barrier(2)

    def run(name: str) -> list[torch.Tensor]:
        bound: list[object] = []

        def save() -> int:
            assert len(bound) == 1
            return 7

        def load(saved: int) -> None:
            assert (saved, len(bound)) == (7, 1)
            one.model[0](torch.ones(2, 3))  # begins nothing again

        with trainer(lighthouse, name, kind, min_replica_size=2) as one:
            one.manager.register_state_dict_fn("script", load, save)
            one.evaluate()  # before the block, which begins nothing
            meet.wait(DEADLINE)
            with one.block as block:
                bound.append(block)
                first = one.evaluate()
                one.until(1)
                meet.wait(DEADLINE)
                return [first, *one.shared()]

    equal(*together(lambda: run("a"), lambda: run("b")))


@pytest.mark.parametrize("kind", ["local-async", "diloco"])
def test_a_first_step_without_a_forward_pass_heals_and_applies_no_gradient_of_older_weights(lighthouse, kind) -> None:
    meet = threading.Barrier(2)

    def run(name: str) -> bool:
        with trainer(lighthouse, name, kind, min_replica_size=2) as one:
            one.model(torch.ones(2, 3)).sum().backward()
            meet.wait(DEADLINE)
            with one.block:
                one.inner.step()
                applied = one.model[0].weight.grad is not None
                one.until(1)
                meet.wait(DEADLINE)
                return applied

    assert together(lambda: run("a"), lambda: run("b")) == [True, False], "b has healed"


@pytest.mark.parametrize("kind", ["local-sync", "diloco"])
def test_a_group_that_joins_in_the_last_outer_step_trains_no_step_more(lighthouse, kind) -> None:
    """It heals and takes part in its first forward pass. The step of that pass would change the final weights."""
    trained = threading.Event()

    def weights(one: Trainer) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in one.model.parameters()]

    def first() -> list[torch.Tensor]:
        with trainer(lighthouse, "a", kind) as one, one.block:
            one.until(2)
            trained.set()
            until_connected(lighthouse, "b", asked=True)
            one.until(3)
            return weights(one)

    def second() -> list[torch.Tensor]:
        assert trained.wait(DEADLINE)
        with trainer(lighthouse, "b", kind) as one, one.block:
            one.until(3)
            assert one.inner_steps == 1
            return weights(one)

    equal(*together(first, second))


class Died(Exception):
    """In place of the death of a process."""


def test_a_reduction_that_a_lost_group_interrupts_never_commits_and_its_fragment_is_tried_again(lighthouse) -> None:
    ready, meet = threading.Barrier(2), threading.Barrier(2)

    def survivor() -> None:
        with trainer(lighthouse, "a", "diloco-streaming") as one:
            ready.wait(DEADLINE)  # else one may begin alone, and wait here for the other
            with one.block:
                one.until(1)
                meet.wait(DEADLINE)
                before = one.shared()
                while one.block._schedule.in_flight is None:
                    one.step()
                while one.block._schedule.in_flight is not None:
                    one.step()
                assert one.manager.current_step() == 1, "not committed"
                equal(one.shared(), before)
                fragment = one.block._fragments[1]
                equal([each.detach() for each in fragment._parameters.values()], list(fragment.originals.values()))
                one.until(2)
                equal(one.shared()[:4], before[:4])
                assert not torch.equal(one.shared()[4], before[4]), (
                    "the outer step was that of fragment 1 again, not of fragment 0"
                )

    def victim() -> None:
        with trainer(lighthouse, "b", "diloco-streaming", min_replica_size=2) as one:
            ready.wait(DEADLINE)
            with pytest.raises(Died), one.block:
                one.until(1)

                def die(_fragment: int) -> None:
                    raise Died

                one.block._start = die
                meet.wait(DEADLINE)
                one.until(2)

    together(survivor, victim)


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ({"sync_every": 4}, "here 'DiLoCo sync_every 4', in .* 'DiLoCo sync_every 8'"),
        ({"fragment_sync_delay": 1}, "here 'fragment_sync_delay 1', in .* 'fragment_sync_delay 0'"),
        ({"use_bucketization": True}, "here 'buckets of 33554432 bytes', in .* 'no buckets'"),
        ({"codec": TwoBit}, "here 'codec two-bit', in .* 'codec none'"),
    ],
)
def test_a_group_with_other_settings_is_refused_by_name(lighthouse, odd, named) -> None:
    trained, refused = threading.Event(), threading.Event()

    def usual() -> None:
        with trainer(lighthouse, "a", "diloco") as one, one.block:
            one.until(1)
            trained.set()
            assert refused.wait(DEADLINE)
            one.until(2)

    def differing() -> str:
        assert trained.wait(DEADLINE)
        try:
            with trainer(lighthouse, "b", "diloco", **odd) as one, pytest.raises(MismatchExit) as error, one.block:
                one.until(2)
        finally:
            refused.set()
        return error.value.reason

    _, reason = together(usual, differing)
    assert re.search(named, reason), reason


def test_a_model_that_does_not_heal_is_named(lighthouse) -> None:
    ready = threading.Barrier(2)

    def run(name: str) -> str:
        with trainer(lighthouse, name, "diloco", registered=["inner"]) as one:
            ready.wait(DEADLINE)
            try:
                with one.block:
                    one.until(1)
            except KeepstepError as error:
                return str(error)
            return ""

    source, joiner = together(lambda: run("a"), lambda: run("b"))
    assert source == ""
    assert "its parameters differ from those of its source: return the state_dict() of the model" in joiner


def test_an_inner_optimizer_that_does_not_heal_is_named(lighthouse, caplog) -> None:
    ready = threading.Barrier(2)

    def run(name: str) -> None:
        with trainer(lighthouse, name, "diloco", registered=["model"]) as one:
            if name == "a":
                one.step()  # the inner optimizer has a state
            ready.wait(DEADLINE)
            with one.block:
                one.until(1)
            ready.wait(DEADLINE)

    together(lambda: run("a"), lambda: run("b"))
    assert "the inner optimizer did not heal" in caplog.text


class Policy:
    """Requests of an administrator to the lighthouse."""

    def __init__(self, lighthouse: str) -> None:
        self.url = f"{lighthouse}/v1/jobs/default"

    def verify_each_step(self) -> None:
        headers = {"Content-Type": "application/json"}
        body = json.dumps({"verify_every": 1}).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url, body, headers, method="PATCH"), timeout=30):
            pass

    def compared(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/events", timeout=30) as answer:
            found = json.load(answer)["events"]
        return [one["kind"] for one in found if one["kind"].startswith("replica")]


@pytest.mark.parametrize("kind", ["local-async", "diloco-streaming"])
def test_only_weights_that_are_equal_by_design_are_compared(lighthouse, kind) -> None:
    """Between two outer steps the groups hold different weights; a bit that flips in the originals is found."""
    meet, policy = threading.Barrier(3), Policy(lighthouse)

    def run(name: str) -> None:
        with trainer(lighthouse, name, kind, min_replica_size=3) as one, one.block:
            one.until(1)
            meet.wait(DEADLINE)
            if name == "a":
                policy.verify_each_step()
            meet.wait(DEADLINE)
            one.until(4)
            if name == "a":
                assert set(policy.compared()) == (set() if one.manager.use_async_quorum else {"replicas_verified"})
            meet.wait(DEADLINE)
            if name == "b" and not one.manager.use_async_quorum:
                one.block._fragments[0].originals["weight"][0, 0] += 1
            one.until(7)
            if name == "a" and not one.manager.use_async_quorum:
                assert "replica_diverged" in policy.compared()
            meet.wait(DEADLINE)

    together(*(lambda name=name: run(name) for name in "abc"))


@pytest.mark.parametrize("local", [True, False], ids=["LocalSGD", "DiLoCo"])
@pytest.mark.parametrize("change", ["added", "replaced"])
def test_a_parameter_that_the_inner_optimizer_trains_and_the_groups_do_not_average_is_refused(
    lighthouse, local, change
):
    with manager(lighthouse, "a", use_async_quorum=False) as m:
        trainer = Trainer(m, 1, local=local)
        with trainer.block:
            for _ in range(5):
                trainer.step()
            if change == "added":
                trainer.inner.add_param_group({"params": [nn.Parameter(torch.zeros(9))]})
            else:
                trainer.model[0].weight = nn.Parameter(trainer.model[0].weight.detach().clone())
                trainer.inner.param_groups[0]["params"][0] = trainer.model[0].weight
            with pytest.raises(KeepstepError, match=r"1 parameters of the inner optimizer \(.*were added"):
                for _ in range(9):
                    trainer.step()
