"""A group joins without a stall: it follows the steps of the others, and then replays them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, HTTPTransport, Manager, Optimizer
from keepstep.state import early_copy
from keepstep.state.early_copy import EarlyCopy
from keepstep.state.errors import TransferError
from keepstep.state.pack_layout import PackLayout
from keepstep.step.rank_votes import POLL_TIMEOUTS
from keepstep_mesh.errors import KeepstepError
from tests.services.manager.groups import SECOND, change_policy, events, manager, place_to_meet, together

LAST_STEP = 30
FOLLOWED = 5


class Gate(HTTPTransport[dict[str, Any]]):
    """Receives only when it may. ``fails``: number of receives that fail at the gate."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__(timeout=30 * SECOND, num_chunks=2, hostname="127.0.0.1")
        self.open = threading.Event()
        self.fails = fails

    def recv_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        assert self.open.wait(60)
        if self.fails:
            self.fails -= 1
            raise TransferError("the link broke")
        return super().recv_checkpoint(*args, **options)


class OpensForTheSecond:
    """The event of a gate, which stays closed for the second receive until the training ends."""

    def __init__(self, event: threading.Event) -> None:
        self._first, self._end = event, threading.Event()
        self._waited = 0

    def wait(self, seconds: float) -> bool:
        self._waited += 1
        return (self._first if self._waited == 1 else self._end).wait(seconds)

    def is_set(self) -> bool:
        return self._first.is_set()

    def set(self) -> None:
        (self._end if self._first.is_set() else self._first).set()


class Net(nn.Module):
    """Has averaged buffers (running statistics) and a copied one (the number of batches)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Group:
    """A group that trains with a scheduler and clipped gradients, up to ``LAST_STEP``.

    ``rates``: the script sets the learning rate of each step before its forward pass, instead of a scheduler.
    """

    def __init__(
        self,
        m: Manager,
        seed: int,
        inner: Callable[[Any], torch.optim.Optimizer] = adamw,
        rates: Callable[[int], float] | None = None,
        **options: Any,
    ) -> None:
        self.m, self.model, self.rates = m, Net(seed), rates
        self.ddp = DistributedDataParallel(m, self.model)
        self.inner = inner(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.inner, 0.9)
        after_commit = [] if rates else [self.schedule.step]
        self.optimizer = Optimizer(m, self.inner, catch_up=True, after_commit=after_commit, **options)
        self.noise = torch.Generator().manual_seed(seed)
        m.set_state_dict_fns(self.load, self.state)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.inner.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def step(self) -> bool:
        self.optimizer.zero_grad()
        if self.rates:
            rate = self.rates(self.m.current_step())
            for group in self.inner.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        self.ddp(torch.randn(8, 6, generator=self.noise)).square().sum().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return self.optimizer.step()

    def result(self) -> tuple[int, int, list[bytes]]:
        """Step, batches, and every number of the state, bit for bit."""
        tensors = [*self.model.state_dict().values()]
        tensors += [
            one for each in self.inner.state_dict()["state"].values() for one in each.values() if one is not None
        ]
        numbers = torch.tensor([self.inner.param_groups[0]["lr"], self.schedule.last_epoch])
        bits = [one.detach().contiguous().numpy().tobytes() for one in (*tensors, numbers)]
        return self.m.current_step(), self.m.batches_committed(), bits


def veteran(
    lighthouse: str, ahead: threading.Event, joined: threading.Event, ranks: dict[str, Any] | None = None, **group: Any
) -> Any:
    with manager(lighthouse, "a", **(ranks or {})) as m:
        own = Group(m, 1, **group)
        for _ in range(3):
            assert own.step()
        if m.group_rank() == 0:
            change_policy(lighthouse, min_replicas=2)  # else this group may be at the end before the other one asks
        ahead.set()
        assert joined.wait(60)
        while m.current_step() < LAST_STEP:
            own.step()
        m.finish()
        return own.result()


def joiner(
    lighthouse: str, ahead: threading.Event, joined: threading.Event, gate: Gate, veterans: int = 1, **group: Any
) -> Any:
    """Returns the result, the number of steps that it followed, and of the groups that took part at the end."""
    assert ahead.wait(60)
    with manager(lighthouse, "b", checkpoint_transport=gate) as m:
        own, followed = Group(m, 2, **group), 0
        joined.set()
        while m.current_step() < LAST_STEP:
            own.step()
            followed += m.catching_up
            if followed == FOLLOWED and not gate.open.is_set():
                with pytest.raises(KeepstepError, match="catches up, and its weights are older"):
                    m.state_dict()
                with pytest.raises(KeepstepError, match="save only while"):
                    m.save_checkpoint()
                assert m.num_participants() == veterans, "it is not in the divisor"
                gate.open.set()
        took_part = m.num_participants()
        gate.open.set()
        m.finish()
        return own.result(), followed, took_part


def test_a_group_that_catches_up_is_equal_bit_for_bit(lighthouse, steps, monkeypatch):
    """Its source has copied the state beside its forward and backward pass, which change the buffers."""
    right, in_time = EarlyCopy.right, []

    def noted(early: EarlyCopy, layout: PackLayout) -> tuple[torch.Tensor | None, frozenset[int]]:
        found = right(early, layout)
        in_time.append((len(found[1]), len(layout.sources)))
        return found

    monkeypatch.setattr(early_copy, "MIN_BYTES", 1)
    monkeypatch.setattr(EarlyCopy, "right", noted)
    gate, ahead, joined = Gate(), threading.Event(), threading.Event()
    a, (b, followed, took_part) = together(
        lambda: veteran(lighthouse, ahead, joined, inner=sgd),
        lambda: joiner(lighthouse, ahead, joined, gate, inner=sgd),
    )
    assert b == a
    assert followed >= FOLLOWED, "the others took these steps while the state did not arrive"
    assert took_part == 2, "and counted it afterwards"
    assert {"follows", "caught_up"} < set(events(steps))
    assert "healed" not in events(steps)
    parameters, moments, buffers = 6, 6, 3
    assert in_time == [(parameters + moments, parameters + moments + buffers)]


def adamw_with_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01))


@pytest.mark.parametrize("inner", [sgd, adamw_with_a_tensor])
def test_a_replay_takes_the_learning_rate_that_the_script_set_for_each_step(lighthouse, steps, inner):
    """As nanoGPT does. Some rates are those with which the group that joins begins."""

    def rate(step: int) -> float:
        return 0.1 if step % 3 == 0 else 0.1 / (1 + step)

    gate, ahead, joined = Gate(), threading.Event(), threading.Event()
    a, (b, followed, took_part) = together(
        lambda: veteran(lighthouse, ahead, joined, inner=inner, rates=rate),
        lambda: joiner(lighthouse, ahead, joined, gate, inner=inner, rates=rate),
    )
    assert b == a
    assert (followed >= FOLLOWED, took_part) == (True, 2)
    happened = events(steps)
    assert happened.count("follows") == happened.count("caught_up") == 1, "it settles at once"
    assert not {"diverged", "gave_up", "torn"} & set(happened)


def test_a_replay_takes_the_learning_rates_of_the_script_also_where_two_groups_took_the_steps(lighthouse, steps):
    """Two veterans average what the third group replays. They wait at step 3 for its connection."""

    def rate(step: int) -> float:
        return 0.1 if step % 3 == 0 else 0.1 / (1 + step)

    gate, begun, ahead, joined = Gate(), threading.Barrier(2), threading.Event(), threading.Event()

    def train(name: str, seed: int) -> Any:
        with manager(lighthouse, name) as m:
            own = Group(m, seed, inner=sgd, rates=rate)
            begun.wait(60)
            change_policy(lighthouse, min_replicas=2)
            while m.current_step() < 3:
                own.step()
            if begun.wait(60) == 0:
                change_policy(lighthouse, min_replicas=3)  # else they may be at the end before the third one asks
                ahead.set()
            assert joined.wait(60)
            while m.current_step() < LAST_STEP:
                own.step()
            took_part = m.num_participants()
            m.finish()
            return own.result(), took_part

    (a, _), (c, of_c), (b, followed, took_part) = together(
        lambda: train("a", 1),
        lambda: train("c", 3),
        lambda: joiner(lighthouse, ahead, joined, gate, inner=sgd, rates=rate, veterans=2),
    )
    assert a == b == c
    assert (followed >= FOLLOWED, took_part, of_c) == (True, 3, 3)
    happened = events(steps)
    assert happened.count("follows") == happened.count("caught_up") == 1, "it settles at once"
    assert not {"diverged", "gave_up", "torn"} & set(happened)


def test_a_catch_up_that_fails_begins_again_and_the_end_waits_for_it(lighthouse, steps, monkeypatch):
    gate, ahead, joined = Gate(fails=1), threading.Event(), threading.Event()
    monkeypatch.setattr(gate, "open", OpensForTheSecond(gate.open))
    a, (b, followed, took_part) = together(
        lambda: veteran(lighthouse, ahead, joined), lambda: joiner(lighthouse, ahead, joined, gate)
    )
    assert b == a
    assert (followed > FOLLOWED, took_part) == (True, 1), "it followed to the end"
    assert [one for one in events(steps) if one in {"follows", "gave_up", "caught_up"}] == [
        *("follows", "gave_up", "follows", "caught_up")
    ]


def test_without_memory_for_gradients_the_others_wait_for_the_state(lighthouse, steps):
    gate, ahead, joined = Gate(), threading.Event(), threading.Event()
    gate.open.set()
    a, (b, followed, took_part) = together(
        lambda: veteran(lighthouse, ahead, joined, catch_up_memory=1),
        lambda: joiner(lighthouse, ahead, joined, gate, catch_up_memory=1),
    )
    assert b == a
    assert (followed, took_part) == (0, 2), "it waited in its first step, and replayed that"
    assert "caught_up" in events(steps)


def test_the_ranks_of_a_group_catch_up_in_the_same_step(lighthouse, steps):
    """The state of rank 1 arrives later, so both ranks follow until then."""
    homes = {name: place_to_meet() for name in "ab"}
    gates, ahead, joined = [Gate(), Gate()], threading.Event(), threading.Event()

    def join(rank: int) -> tuple[Any, int]:
        assert ahead.wait(60)
        with manager(lighthouse, "b", checkpoint_transport=gates[rank], rank=rank, **homes["b"]) as m:
            own, followed = Group(m, 2), 0
            joined.set()
            while m.current_step() < LAST_STEP:
                own.step()
                followed += m.catching_up
                if followed >= FOLLOWED * (rank + 1):
                    gates[rank].open.set()
            m.finish()
            return own.result(), followed

    stay = [partial(veteran, lighthouse, ahead, joined, {"rank": rank, **homes["a"]}) for rank in range(2)]
    a0, a1, (b0, followed0), (b1, followed1) = together(*stay, *(partial(join, rank) for rank in range(2)))
    assert (b0, b1) == (a0, a1)
    assert followed0 == followed1 >= 2 * FOLLOWED
    assert "torn" not in events(steps)


def test_all_ranks_wait_for_the_state_when_one_has_no_memory_left(lighthouse, steps):
    """Rank 0 has memory left, and its state. That of rank 1 arrives later than a poll of the ranks would end."""
    homes = {name: place_to_meet() for name in "ab"}
    gates, ahead, joined = [Gate(), Gate()], threading.Event(), threading.Event()
    gates[0].open.set()

    def join(rank: int) -> tuple[Any, int]:
        assert ahead.wait(60)
        how = {"checkpoint_transport": gates[rank], "timeout": SECOND, "rank": rank, **homes["b"]}
        with manager(lighthouse, "b", **how) as m:
            own, followed = Group(m, 2, catch_up_memory=1 if rank else 1 << 30), 0
            joined.set()
            while m.current_step() < LAST_STEP:
                own.step()
                followed += m.catching_up
            m.finish()
            return own.result(), followed

    def release() -> None:
        assert joined.wait(60)
        time.sleep((POLL_TIMEOUTS + 1) * SECOND.total_seconds())  # the poll must time out before the gate opens
        gates[1].open.set()

    stay = [partial(veteran, lighthouse, ahead, joined, {"rank": rank, **homes["a"]}) for rank in range(2)]
    a0, a1, (b0, followed0), (b1, followed1), _ = together(*stay, *(partial(join, rank) for rank in range(2)), release)
    assert (b0, b1) == (a0, a1)
    assert (followed0, followed1) == (0, 0), "both waited in their first step"


def test_a_group_keeps_its_state_when_all_that_it_follows_begin_again(lighthouse, steps):
    """Its own state, from a checkpoint, is older than theirs was, and later than their beginning."""
    gate, ahead, joined, follows = Gate(), threading.Event(), threading.Event(), threading.Event()

    def begins_again() -> Any:
        with manager(lighthouse, "a") as m:
            own = Group(m, 1)
            for _ in range(3):
                assert own.step()
            change_policy(lighthouse, min_replicas=2)
            ahead.set()
            assert joined.wait(60)
            while not follows.is_set():
                own.step()
        with manager(lighthouse, "a") as m:
            own = Group(m, 1)
            while m.current_step() < LAST_STEP:
                own.step()
            m.finish()
            return own.result()

    def resumes() -> Any:
        assert ahead.wait(60)
        with manager(lighthouse, "b", checkpoint_transport=gate) as m:
            own = Group(m, 2)
            m.load_state_dict({"step": 2, "batches_committed": 2})
            joined.set()
            while m.current_step() < LAST_STEP:
                own.step()
                if m.catching_up:
                    follows.set()
            gate.open.set()
            m.finish()
            return own.result()

    a, b = together(begins_again, resumes)
    assert a == b
    logged = [json.loads(line) for line in steps.read_text().splitlines()]
    of_b = [(one["event"], one["step"]) for one in logged if one["replica_id"].startswith("b")]
    went_on = of_b[of_b.index(("gave_up", 2)) :]
    assert next(one for one in went_on if one[0] in {"healed", "committed"}) == ("committed", 3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"use_async_quorum": False}, "catch_up=True needs Manager"),
        ({"heal_over_pg": True}, "does not work with PGTransport"),
    ],
    ids=["synchronous", "transport"],
)
def test_settings_that_do_not_allow_it_are_refused(lighthouse, options, why):
    with manager(lighthouse, "a", **options) as m, pytest.raises(ValueError, match=why):
        Group(m, 1)


def test_limits_of_the_optimizer_are_named(lighthouse):
    with manager(lighthouse, "a") as m:
        with pytest.raises(ValueError, match="catch_up_memory=0 must be at least 1 byte"):
            Group(m, 1, catch_up_memory=0)
        own = Group(m, 1)
        with pytest.raises(ValueError, match="give it to one optimizer only"):
            Optimizer(m, own.inner, catch_up=True)
