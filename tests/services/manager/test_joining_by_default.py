"""A group joins with nothing configured: it catches up, and is equal whatever the script does between two steps."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer
from keepstep.step.catching_up import join_choice
from keepstep.transfer.state_transfer import Transfer
from tests.services.manager.groups import change_policy, events, manager, refusal, together
from tests.services.manager.test_catching_up import FOLLOWED, LAST_STEP, Gate, Net

CHANGES = {"follows", "caught_up", "gave_up", "healed", "torn", "diverged"}


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Let small states be caught up with, and no group wait for the state of its first step."""
    monkeypatch.setattr(join_choice, "LEAST_BYTES", 0)
    monkeypatch.setattr(join_choice, "NEARLY_HERE_SECONDS", 0.0)


class Script:
    """The loop of a user who knows nothing of catching up."""

    def __init__(self, m: Manager, seed: int) -> None:
        self.m = m
        self.model = Net(seed)
        self.ddp = DistributedDataParallel(m, self.model)
        self.inner = self.optimizer_of(self.model.parameters())
        self.optimizer = Optimizer(m, self.inner)
        self.noise = torch.Generator().manual_seed(seed)
        m.set_state_dict_fns(self.load, self.state)

    def optimizer_of(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.inner.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def loss(self) -> torch.Tensor:
        return self.ddp(torch.randn(8, 6, generator=self.noise)).square().sum()

    def backward(self) -> None:
        self.loss().backward()

    def before_step(self) -> None:
        """Between the backward pass and the step of the optimizer."""

    def after_step(self, stepped: bool) -> None:
        """Between two steps."""

    def step(self) -> bool:
        self.optimizer.zero_grad()
        self.backward()
        self.before_step()
        stepped = self.optimizer.step()
        self.after_step(stepped)
        return stepped

    def result(self) -> tuple[int, int, list[bytes]]:
        return self.m.current_step(), self.m.batches_committed(), bits(self.state())


def bits(value: Any) -> list[bytes]:
    if isinstance(value, torch.Tensor):
        return [value.detach().contiguous().numpy().tobytes()]
    if isinstance(value, dict):
        return [one for key in value for one in bits(value[key])]
    if isinstance(value, (list, tuple)):
        return [one for each in value for one in bits(each)]
    return [repr(value).encode()]


class Scheduled(Script):
    """Steps a scheduler as torch's documentation does, if the optimizer has stepped."""

    def __init__(self, m: Manager, seed: int) -> None:
        super().__init__(m, seed)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.inner, 0.01, LAST_STEP + 1)

    def state(self) -> dict[str, Any]:
        return super().state() | {"schedule": self.schedule.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.schedule.load_state_dict(state["schedule"])

    def after_step(self, stepped: bool) -> None:
        if stepped:
            self.schedule.step()


def join(
    lighthouse: str, script: Callable[[Manager, int], Script], followed: int = FOLLOWED, **options: Any
) -> tuple[Any, Any, list[bool]]:
    """Train a group, and let another one join whose state arrives after ``followed`` steps without weights.

    Returns:
        The result of both, and for each step of the second whether its weights were those of the step.
    """
    gate, ahead, joined = Gate(), threading.Event(), threading.Event()

    def veteran() -> Any:
        with manager(lighthouse, "a", **options) as m:
            own = script(m, 1)
            while m.current_step() < 3:
                own.step()
            change_policy(lighthouse, min_replicas=2)  # else this group may be at the end before the other one asks
            ahead.set()
            assert joined.wait(60)
            while m.current_step() < LAST_STEP:
                own.step()
            m.finish()
            return own.result()

    def joiner() -> Any:
        assert ahead.wait(60)
        with manager(lighthouse, "b", checkpoint_transport=gate, **options) as m:
            own, equal = script(m, 2), list[bool]()
            joined.set()
            if not followed:
                gate.open.set()
            while m.current_step() < LAST_STEP:
                own.step()
                equal.append(not m.catching_up)
                if equal.count(False) == followed:
                    gate.open.set()
            gate.open.set()
            m.finish()
            return own.result(), equal

    a, (b, equal) = together(veteran, joiner)
    return a, b, equal


class Unguarded(Scheduled):
    """Steps its scheduler in each iteration, whatever the optimizer did."""

    def after_step(self, stepped: bool) -> None:  # noqa: ARG002
        self.schedule.step()


class WithTensorRates(Scheduled):
    """The learning rate of the next step, which a scheduler has set, is in the state."""

    def optimizer_of(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=torch.tensor(0.1), momentum=0.9, nesterov=True)


class Clipped(Script):
    """Accumulates gradients over two passes, and clips the average."""

    def backward(self) -> None:
        with self.ddp.no_sync():
            self.loss().backward()
        self.loss().backward()

    def before_step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)


class Compressed(Script):
    """Its gradients are averaged in int8, the first layer is frozen, and the loss is computed in bfloat16."""

    def __init__(self, m: Manager, seed: int) -> None:
        super().__init__(m, seed)
        self.model.body[0].requires_grad_(False)
        self.ddp = DistributedDataParallel(m, self.model, should_quantize=True)

    def loss(self) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss().float()


class Scaled(Script):
    """Trains in float16, as torch's documentation does. Its scale changes in every second step."""

    def __init__(self, m: Manager, seed: int) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=2)
        super().__init__(m, seed)

    def state(self) -> dict[str, Any]:
        return super().state() | {"scaler": self.scaler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.scaler.load_state_dict(state["scaler"])

    def backward(self) -> None:
        self.scaler.scale(self.loss()).backward()

    def step(self) -> bool:
        self.optimizer.zero_grad()
        self.backward()
        self.before_step()
        stepped = bool(self.scaler.step(self.optimizer))
        self.scaler.update()
        self.after_step(stepped)
        return stepped


class ClipsScaled(Scaled):
    """Divides the gradients by its own scale before it clips them, which no replay can undo."""

    def before_step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)


class ChangesWeights(Script):
    """Clamps the weights after a step, and averages them in a model of its own, both through ``.data``."""

    def __init__(self, m: Manager, seed: int) -> None:
        self.average = Net(seed)
        super().__init__(m, seed)

    def state(self) -> dict[str, Any]:
        return super().state() | {"average": self.average.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.average.load_state_dict(state["average"])

    def after_step(self, stepped: bool) -> None:
        if stepped:
            for mean, one in zip(self.average.parameters(), self.model.parameters(), strict=True):
                one.data.clamp_(-0.1, 0.1)
                mean.data.mul_(0.9).add_(one.data, alpha=0.1)


class Unfreezes(Script):
    """Adds a param group in the middle of the training."""

    def optimizer_of(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        *first, self.late = parameters
        return torch.optim.AdamW(first, lr=0.01)

    def load(self, state: dict[str, Any]) -> None:
        self.unfreeze(len(state["optimizer"]["param_groups"]))
        super().load(state)

    def unfreeze(self, groups: int) -> None:
        if groups > len(self.inner.param_groups):
            self.inner.add_param_group({"params": [self.late]})

    def after_step(self, stepped: bool) -> None:  # noqa: ARG002
        self.unfreeze(2 if self.m.current_step() >= 6 else 1)


class Evaluates(Script):
    """Evaluates and saves after each step, and notes what it saw."""

    def __init__(self, m: Manager, seed: int) -> None:
        super().__init__(m, seed)
        self.seen: list[tuple[int, list[bytes]]] = []

    def after_step(self, stepped: bool) -> None:  # noqa: ARG002
        self.model.eval()
        with torch.no_grad():
            loss = self.model(torch.ones(2, 6))
        self.model.train()
        self.seen.append((self.m.state_dict()["step"], bits([loss, self.state()])))

    def result(self) -> Any:
        return *super().result(), self.seen[-20:]


@pytest.fixture
def kept(monkeypatch):
    """Return the chunks that were here already, and all chunks, of each transfer of a state that was there."""
    found, right = list[tuple[int, int]](), Transfer.chunks_here

    def noted(transfer: Transfer, digests: Sequence[bytes]) -> int:
        here = right(transfer, digests)
        if transfer._had_spare:
            found.append((here.bit_count(), len(digests)))
        return here

    monkeypatch.setattr(Transfer, "chunks_here", noted)
    return found


EXACT = [Script, Scheduled, Unguarded, Clipped, Compressed, Scaled]


@pytest.mark.parametrize("script", EXACT)
def test_a_replay_gives_the_weights_of_the_others(lighthouse, steps, kept, script):
    a, b, equal = join(lighthouse, script)
    assert b == a
    assert equal.count(False) > FOLLOWED
    assert kept == [(1, 1)], "and the heal after it brought no tensor"
    assert [one for one in events(steps) if one in CHANGES] == ["follows", "caught_up", "healed"]


@pytest.mark.parametrize("script", [WithTensorRates, ChangesWeights, Unfreezes])
def test_what_a_replay_cannot_know_is_taken_over(lighthouse, steps, kept, script):
    a, b, equal = join(lighthouse, script)
    assert b == a
    assert equal.count(False) >= FOLLOWED
    assert [here for here, _ in kept] in ([], [0])
    assert [one for one in events(steps) if one in CHANGES][-1] == "healed"


def test_a_script_that_reads_the_weights_waits_for_them(lighthouse, steps):
    a, b, equal = join(lighthouse, Evaluates, followed=0)
    assert b == a
    assert equal.count(False) <= 1
    assert "torn" not in events(steps)


class WithHooks(Script):
    def __init__(self, m: Manager, seed: int) -> None:
        super().__init__(m, seed)
        self.inner.register_step_post_hook(lambda *_: None)


class WithTwo(Script):
    def __init__(self, m: Manager, seed: int) -> None:
        super().__init__(m, seed)
        self.other = Optimizer(m, torch.optim.SGD(self.model.parameters(), lr=0.0))

    def after_step(self, stepped: bool) -> None:  # noqa: ARG002
        self.other.zero_grad()
        self.other.step()


@pytest.mark.parametrize(
    ("options", "optimizers", "said"),
    [
        ({}, [None], "catches up"),
        ({}, [True], "catches up"),
        ({}, [False], "heals: Optimizer(catch_up=False)"),
        ({}, [None, None], "heals: the script has 2 optimizers"),
        ({}, [], "heals: no keepstep.Optimizer takes the steps"),
        ({"heal_over_pg": True}, [None], "heals: PGTransport receives within a step"),
    ],
)
def test_the_lighthouse_tells_how_a_group_joins(lighthouse, options, optimizers, said):
    with manager(lighthouse, "a", **options) as m:
        for catch_up in optimizers:
            Optimizer(m, torch.optim.SGD(nn.Linear(1, 1).parameters()), catch_up=catch_up)
        m.start_quorum()
        assert m.should_commit()
        with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default", timeout=30) as answer:
            assert json.load(answer)["joins"] == said


def test_a_group_that_must_not_catch_up_does_not_train_with_one_that_must(lighthouse):
    def with_choice(catch_up: bool | None) -> Callable[[Manager], object]:
        return lambda m: Optimizer(m, torch.optim.SGD(nn.Linear(1, 1).parameters()), catch_up=catch_up)

    assert "optimizer does not catch up" in refusal(lighthouse, with_choice(None), with_choice(False))


@pytest.mark.parametrize("script", [WithHooks, WithTwo, ClipsScaled])
def test_a_script_that_no_group_can_replay_heals(lighthouse, steps, script):
    a, b, _ = join(lighthouse, script, followed=0)
    assert b == a
    assert [one for one in events(steps) if one in CHANGES] == ["healed"]


def test_a_small_state_heals(lighthouse, steps, monkeypatch):
    monkeypatch.setattr(join_choice, "LEAST_BYTES", 1 << 20)
    a, b, equal = join(lighthouse, Script, followed=0)
    assert b == a
    assert all(equal)
    assert [one for one in events(steps) if one in CHANGES] == ["healed"]


def test_the_others_wait_for_a_state_that_is_nearly_here(lighthouse, steps, monkeypatch):
    monkeypatch.setattr(join_choice, "NEARLY_HERE_SECONDS", 60.0)
    monkeypatch.setattr(join_choice, "RATE_KNOWN_SECONDS", 60.0)
    a, b, equal = join(lighthouse, Scheduled, followed=0)
    assert b == a
    assert all(equal)
    assert [one for one in events(steps) if one in CHANGES] == ["follows", "caught_up"]


def test_a_group_that_stops_without_finish_has_the_last_weights(lighthouse):
    """Its state arrives after its last step."""
    gate, ahead, joined, ended = Gate(), threading.Event(), threading.Event(), threading.Event()

    def veteran() -> Any:
        with manager(lighthouse, "a") as m:
            own = Script(m, 1)
            while m.current_step() < 3:
                own.step()
            change_policy(lighthouse, min_replicas=2)
            ahead.set()
            assert joined.wait(60)
            while m.current_step() < LAST_STEP:
                own.step()
            assert ended.wait(60)
            return own.result()

    def joiner() -> Any:
        assert ahead.wait(60)
        with manager(lighthouse, "b", checkpoint_transport=gate) as m:
            own = Script(m, 2)
            joined.set()
            while m.current_step() < LAST_STEP:
                own.step()
            assert m.catching_up
            gate.open.set()
        ended.set()
        return own.result()

    a, b = together(veteran, joiner)
    assert b == a


def test_a_group_that_catches_up_repeats_the_step_of_a_lost_member_with_the_others(lighthouse, steps):
    """``retry_allreduce``: the member leaves in the middle of a step, without a word."""
    gate, ahead, joined, lost = Gate(), threading.Barrier(2), threading.Event(), threading.Event()

    def veteran(name: str, seed: int) -> Any:
        with manager(lighthouse, name, retry_allreduce=True) as m:
            own = Script(m, seed)
            ahead.wait(60)
            change_policy(lighthouse, min_replicas=2, finish_grace=0)
            while m.current_step() < 3:
                own.step()
            if ahead.wait(60) == 0:
                change_policy(lighthouse, min_replicas=3)
                joined.set()
            while m.current_step() < LAST_STEP:
                if name == "c" and lost.is_set():
                    own.optimizer.zero_grad()
                    return m.num_participants()
                own.step()
            m.finish()
            return own.result()

    def joiner() -> Any:
        assert joined.wait(60)
        with manager(lighthouse, "b", checkpoint_transport=gate, retry_allreduce=True) as m:
            own, followed = Script(m, 2), 0
            while m.current_step() < LAST_STEP:
                own.step()
                followed += m.catching_up
                if followed == FOLLOWED and not lost.is_set():
                    change_policy(lighthouse, min_replicas=2)
                    lost.set()
                if followed > FOLLOWED and m.num_participants() == 1:
                    gate.open.set()
            m.finish()
            return own.result()

    a, _, b = together(lambda: veteran("a", 1), lambda: veteran("c", 3), joiner)
    assert b == a
    happened = events(steps)
    assert happened.count("retried") == 2
    assert "discarded" not in happened
    assert [one for one in happened if one in CHANGES][-3:] == ["follows", "caught_up", "healed"]
