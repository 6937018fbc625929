"""A model's buffers under DDP: running statistics are averaged, all others are the first group's, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, PureDistributedDataParallel
from keepstep.runtime.exits import MismatchExit
from tests.services.manager.groups import manager, together

WRAPPERS = [DistributedDataParallel, PureDistributedDataParallel]
STEPS = 4


class WithBuffers(nn.Module):
    """One parameter, and ``buffers``."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def constants() -> dict[str, torch.Tensor]:
    """Return data that models keep in buffers and no step changes."""
    rope = torch.outer(torch.arange(64.0), 10000 ** -(torch.arange(0, 32, 2) / 32))
    odd = torch.tensor([float("nan"), -float("inf"), float("inf"), -0.0, 1e-45])
    odd.view(torch.int32)[0] |= 0x1234  # a NaN with a payload
    return {
        "rope_cos": rope.cos().bfloat16(),
        "rope_sin": rope.sin().half(),
        "mask": torch.full((5, 5), torch.finfo(torch.float32).min).triu(1),
        "half_mask": torch.full((3,), torch.finfo(torch.float16).min, dtype=torch.float16),
        "odd": odd,
        "doubles": torch.arange(3, dtype=torch.float64) / 7,
        "rotations": torch.view_as_complex(torch.arange(6.0).view(3, 2) / 7).conj(),
        "scales": torch.tensor([0.5, -448.0, 3.0]).to(torch.float8_e4m3fn),
        "small": torch.tensor([-32768, 7], dtype=torch.int16),
        "unsigned": torch.tensor([65535, 7], dtype=torch.uint16),
        "causal": torch.ones(7, 7, dtype=torch.bool).tril(),
        "positions": torch.arange(9).expand(4, -1),
        "transposed": (torch.arange(15.0) / 7).view(3, 5).t(),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
    }


def bits(buffer: torch.Tensor) -> list[int]:
    flat = buffer.detach().resolve_conj().reshape(-1).contiguous()
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def train(
    lighthouse: str,
    names: str,
    make: Callable[[str], nn.Module],
    *,
    wrapper: Any = DistributedDataParallel,
    move: Callable[[str, nn.Module, int], None] = lambda *_: None,
    **options: Any,
) -> list[nn.Module]:
    """The models of all groups after ``STEPS`` steps. ``move``: what a forward pass does with the buffers."""
    ready = threading.Barrier(len(names))

    def group(name: str) -> nn.Module:
        torch.manual_seed(0)
        model = make(name)
        with manager(lighthouse, name, min_replica_size=len(names), init_sync=False) as m:
            wrapped = wrapper(m, model, **options)
            ready.wait(30)
            for number in range(STEPS):
                m.start_quorum()
                move(name, model, number)
                wrapped(torch.randn(4, 1) * (1 + ord(name))).square().sum().backward()
                assert m.should_commit(), m.errored()
            ready.wait(30)
            return model

    return together(*(lambda name=name: group(name) for name in names))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_constants_of_every_dtype_stay_as_they_are_bit_for_bit(lighthouse, wrapper):
    before = {name: bits(buffer) for name, buffer in constants().items()}
    for model in train(lighthouse, "abc", lambda _: WithBuffers(**constants()), wrapper=wrapper):
        assert {name: bits(buffer) for name, buffer in model.named_buffers()} == before


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_buffer_that_every_group_changes_is_that_of_the_first_group_in_all(lighthouse, wrapper):
    def move(name: str, model: nn.Module, number: int) -> None:
        model.queue[number % 3] = torch.tensor(ord(name) / 3, dtype=torch.bfloat16)
        model.count += ord(name)

    def make(_: str) -> nn.Module:
        return WithBuffers(queue=torch.zeros(3, dtype=torch.bfloat16), count=torch.tensor(0, dtype=torch.int16))

    a, b = train(lighthouse, "ab", make, wrapper=wrapper, move=move)
    assert a.count.item() == b.count.item() == STEPS * ord("a")
    assert bits(a.queue) == bits(b.queue) == bits(torch.full((3,), ord("a") / 3).bfloat16())


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.weight * x)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_running_statistics_are_those_of_all_groups(lighthouse, wrapper):
    seen: dict[str, list[torch.Tensor]] = {"a": [], "b": []}

    class Watched(nn.BatchNorm1d):
        def __init__(self, name: str) -> None:
            super().__init__(1, affine=False, momentum=1.0)  # what one batch was
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen[self.name].append(x.detach())
            return super().forward(x)

    a, b = train(lighthouse, "ab", lambda name: Normed(Watched(name)), wrapper=wrapper)
    last = seen["a"][-1], seen["b"][-1]
    assert a.norm.running_mean.item() == b.norm.running_mean.item()
    assert a.norm.running_mean.item() == pytest.approx(sum(x.mean().item() for x in last) / 2)
    assert a.norm.running_var.item() == b.norm.running_var.item()
    assert a.norm.running_var.item() == pytest.approx(sum(x.var().item() for x in last) / 2)
    assert a.norm.num_batches_tracked.item() == b.norm.num_batches_tracked.item() == STEPS


def test_statistics_of_a_norm_that_does_not_train_stay_bit_for_bit(lighthouse):
    def make(_: str) -> nn.Module:
        model = Normed(nn.BatchNorm1d(1))
        model.norm.running_mean.fill_(1 / 3)
        model.norm.running_var.fill_(0.1)
        model.norm.eval()
        return model

    for model in train(lighthouse, "abc", make):
        assert bits(model.norm.running_mean) == bits(torch.tensor([1 / 3]))
        assert bits(model.norm.running_var) == bits(torch.tensor([0.1]))


def test_further_buffers_are_averaged_and_others_left_alone_by_name(lighthouse):
    def move(name: str, model: nn.Module, _: int) -> None:
        model.ema_of_loss.fill_(ord(name))
        model.own_cache.fill_(ord(name))

    def make(_: str) -> nn.Module:
        return WithBuffers(ema_of_loss=torch.zeros(2), own_cache=torch.zeros(2), shared=torch.ones(2))

    options = {"average_buffers": ["ema_*"], "ignore_buffers": ["own_cache"]}
    a, b = train(lighthouse, "ac", make, move=move, **options)
    assert a.ema_of_loss.tolist() == b.ema_of_loss.tolist() == [ord("b")] * 2
    assert a.own_cache.tolist() == [ord("a")] * 2
    assert b.own_cache.tolist() == [ord("c")] * 2


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_buffer_that_cannot_be_synchronized_is_refused_when_the_model_is_wrapped(lighthouse, wrapper):
    sparse = WithBuffers(adjacency=torch.eye(3).to_sparse())
    with manager(lighthouse, "a") as m:
        with pytest.raises(ValueError, match=r"buffer 'adjacency' .*sparse.*ignore_buffers"):
            wrapper(m, sparse)
        with pytest.raises(ValueError, match=r"ignore_buffers: 'adjacancy' matches no buffer.*adjacency"):
            wrapper(m, sparse, ignore_buffers=["adjacancy"])
        with pytest.raises(ValueError, match=r"buffer 'ids' cannot be averaged.*int64"):
            wrapper(m, WithBuffers(ids=torch.arange(3)), average_buffers=["ids"])
        with pytest.raises(ValueError, match=r"buffer 'ema' is named in both"):
            wrapper(m, WithBuffers(ema=torch.ones(3)), average_buffers=["ema"], ignore_buffers=["e*"])
        wrapper(m, sparse, ignore_buffers=["adjacency"])
        wrapper(m, sparse, sync_buffers=False)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("after", [torch.zeros(4), torch.zeros(2, dtype=torch.float64), None], ids=str)
def test_a_buffer_that_is_another_one_after_wrapping_raises_in_the_backward_pass(lighthouse, wrapper, after):
    model = WithBuffers(cache=torch.zeros(2))
    with manager(lighthouse, "a") as m:
        wrapped = wrapper(m, model)
        m.start_quorum()
        model.cache = after
        with pytest.raises(RuntimeError, match=r"buffer 'cache' was \(2,\) torch.float32 when .* ignore_buffers"):
            wrapped(torch.ones(1, 1)).sum().backward()
        assert not m.should_commit()


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ({"ignore_buffers": ["rope"]}, r"buffer rope \(2,\) torch.float32 ignored"),
        ({"average_buffers": ["rope"]}, r"buffer rope \(2,\) torch.float32 averaged"),
        ({"sync_buffers": False}, r"buffer rope \(2,\) torch.float32 ignored"),
    ],
    ids=["ignored", "averaged", "not synced"],
)
def test_a_group_that_treats_a_buffer_in_another_way_is_refused(lighthouse, odd, named):
    done = threading.Event()
    trained = threading.Event()

    def veteran() -> None:
        with manager(lighthouse, "a") as m:
            DistributedDataParallel(m, WithBuffers(rope=torch.zeros(2)))
            m.start_quorum()
            assert m.should_commit()
            trained.set()
            assert done.wait(30)

    def stranger() -> None:
        assert trained.wait(30)
        try:
            with manager(lighthouse, "b") as m:
                DistributedDataParallel(m, WithBuffers(rope=torch.zeros(2)), **odd)
                with pytest.raises(MismatchExit, match=f"here '{named}', in a '.* copied"):
                    m.start_quorum()
        finally:
            done.set()

    together(veteran, stranger)
