"""The blocks of LocalSGD and DiLoCo: the arguments they refuse, the steps they count, and their ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from keepstep.collectives.codecs import Codec, Quantized, TopK, TwoBit
from keepstep.ddp import PureDistributedDataParallel
from keepstep.local_sgd import DiLoCo, LocalSGD, extract_local_tensor
from keepstep.optim import OptimizerWrapper
from keepstep.process_group import ProcessGroupDummy
from keepstep_mesh.errors import KeepstepError
from tests.unit.keepstep.local_sgd.groups import SHAPE, Groups, Member, alone, make, module_of, train, weights


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sync_every": 0}, "sync_every=0 must be at least 1"),
        ({"fragment_sync_delay": 2}, r"fragment_sync_delay=2 must be in \[0, 2\)"),
        ({"model": module_of([((2,), torch.complex64)]), "codec": TwoBit()}, "'p0' is torch.complex64, and codec two-"),
        ({"fragment_update_alpha": 1.5}, r"fragment_update_alpha=1.5 must be in \[0, 1\]"),
        ({"use_bucketization": True, "bucket_cap_mb": 0}, "bucket_cap_mb=0 must be above 0"),
        ({"should_quantize": True, "codec": TwoBit()}, "should_quantize=True and codec=two-bit are two ways"),
    ],
)
def test_an_argument_out_of_range_is_named(options, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        make(alone(), **options)


def test_diloco_needs_a_synchronous_quorum() -> None:
    manager = alone()
    manager.use_async_quorum = True
    with pytest.raises(ValueError, match="pass use_async_quorum=False to the Manager"):
        make(manager)


def test_parameters_that_no_group_would_average_are_named() -> None:
    first, second = module_of([*SHAPE, ((3,), torch.float32)]), module_of(SHAPE)
    everything = [*first.parameters(), *second.parameters()]
    sgd = torch.optim.SGD(everything, lr=0.1)
    manager = alone()
    with pytest.raises(ValueError, match=r"1 parameters of the inner optimizer \(shape \(2, 2\)\) are not in model_fr"):
        DiLoCo(manager, [first], sgd, torch.optim.SGD(everything, lr=1), 2)
    with pytest.raises(ValueError, match=r"parameter 'p0' of fragment 1 is not in the outer optimizer"):
        DiLoCo(manager, [first, second], sgd, torch.optim.SGD(first.parameters(), lr=1), 2)
    with pytest.raises(ValueError, match=r"1 outer optimizers for 2 fragments"):
        DiLoCo(manager, [first, second], sgd, [torch.optim.SGD(everything, lr=1)], 2)
    with pytest.raises(ValueError, match=r"the inner optimizer is an outer optimizer too"):
        DiLoCo(manager, [first, second], sgd, sgd, 2)
    with pytest.raises(TypeError, match=r"an outer optimizer is a keepstep.Optimizer"):
        DiLoCo(manager, [first, second], sgd, OptimizerWrapper(manager, torch.optim.SGD(everything, lr=1)), 2)
    with pytest.raises(ValueError, match=r"fragment 1 has no parameter to train"):
        DiLoCo(manager, [first, nn.ReLU()], torch.optim.SGD(first.parameters(), lr=1), torch.optim.SGD(everything), 2)
    second.register_parameter("tied", first.p0)
    with pytest.raises(ValueError, match=r"parameter 'tied' of fragment 1 is in fragment 0 too"):
        DiLoCo(manager, [first, second], sgd, torch.optim.SGD(everything, lr=1), 2)
    with pytest.raises(ValueError, match=r"2 parameters of the inner optimizer .* are not in the model"):
        LocalSGD(manager, module_of(SHAPE), torch.optim.SGD(first.parameters(), lr=1), 2)
    with pytest.raises(TypeError, match=r"pass the optimizer inside it"):
        LocalSGD(manager, first, OptimizerWrapper(manager, torch.optim.SGD(first.parameters(), lr=1)), 2)
    wrapped = PureDistributedDataParallel(manager, first)
    manager.layout.clear()
    with pytest.raises(TypeError, match=r"pass the plain model"):
        LocalSGD(manager, wrapped, torch.optim.SGD(first.parameters(), lr=1), 2)
    assert manager.states == {}
    assert manager.layout == [], "a refused block adds nothing to the layout of the job"


def test_groups_compare_all_settings_parameters_and_outer_optimizers() -> None:
    manager = alone()
    model = nn.BatchNorm1d(2)
    make(manager, model, sync_every=6, fragment_sync_delay=2, fragment_update_alpha=0.5)
    settings, rest = manager.layout[:6], manager.layout[6:]
    assert settings == [
        "DiLoCo sync_every 6",
        "fragments 1",
        "fragment_sync_delay 2",
        "fragment_update_alpha 0.5",
        "no buckets",
        "codec none",
    ]
    assert rest[0].startswith("fragment 0 outer optimizer SGD(dampening=0,")
    assert "lr=1.0, maximize=False, momentum=0" in rest[0]
    assert rest[1:] == [
        "fragment 0 weight (2,) torch.float32",
        "fragment 0 bias (2,) torch.float32",
        "buffer running_mean (2,) torch.float32 averaged",
        "buffer running_var (2,) torch.float32 averaged",
        "buffer num_batches_tracked () torch.int64 copied",
        "SGD param group 0: fragment 0 weight",
        "SGD param group 0: fragment 0 bias",
    ]
    assert manager.compared == {"StreamingDiLoCoFragment_0"}, "nothing else is equal in all groups"


def test_the_result_of_an_outer_step_is_merged_by_alpha() -> None:
    manager = alone()
    model, inner, diloco = make(manager, module_of([((4,), torch.float64)]), 1, lr=0.5, fragment_update_alpha=0.25)
    (before,) = weights(model)
    with diloco:
        model.p0.grad = torch.full_like(before, 2.0)
        inner.step()
    original = before - 0.5 * 0.2
    torch.testing.assert_close(diloco.state_dict()["fragments"][0]["original_parameters"]["p0"], original)
    torch.testing.assert_close(model.p0.detach(), 0.75 * original + 0.25 * (before - 0.2))


def test_gradients_of_the_inner_optimizer_are_left_alone() -> None:
    """A script may log them after the step, or accumulate."""
    first, second = module_of(SHAPE), module_of(SHAPE)
    everything = [*first.parameters(), *second.parameters()]
    inner, outer = torch.optim.SGD(everything, lr=0.1), torch.optim.SGD(everything, lr=1.0)
    with DiLoCo(alone(), [first, second], inner, outer, 2):
        gradients = [torch.full_like(one, 3.0) for one in everything]
        for parameter, gradient in zip(everything, gradients, strict=True):
            parameter.grad = gradient
        inner.step()
    assert all(one.grad is gradient for one, gradient in zip(everything, gradients, strict=True))


def test_only_steps_inside_of_the_block_count() -> None:
    manager = alone()
    _, inner, diloco = make(manager, sync_every=3)
    train(inner, 0, 0)
    with diloco:
        train(inner, 0, 1)
        train(inner, 0, 2)
    train(inner, 0, 3)
    assert manager.step == 0
    with diloco:
        assert diloco.state_dict()["position"] == 2, "the period goes on in the next block"
        train(inner, 0, 4)
        assert manager.step == 1
        with pytest.raises(RuntimeError, match="this DiLoCo is entered already"):
            diloco.__enter__()
        for step in range(3):
            train(inner, 0, step)
    assert manager.step == 2


def test_an_outer_step_that_has_begun_ends_with_the_block() -> None:
    manager = alone()
    _, inner, diloco = make(manager, sync_every=4, fragment_sync_delay=2)
    with diloco:
        for step in range(3):
            train(inner, 0, step)
        assert (manager.open, manager.step) == (True, 0)
    assert (manager.open, manager.step) == (False, 1)
    assert diloco.state_dict()["position"] == 0


def test_an_exception_leaves_the_block_without_a_collective_and_the_next_outer_step_begins_again() -> None:
    manager = alone()
    model, inner, diloco = make(manager, sync_every=4, fragment_sync_delay=2)

    def fail() -> None:
        with diloco:
            for step in range(3):
                train(inner, 0, step)
            raise KeyError("batch")

    before = weights(model)
    with pytest.raises(KeyError):
        fail()
    assert (manager.open, manager.step) == (True, 0)
    manager.open = False  # the Manager discards the open step in the next start_quorum
    with diloco:
        train(inner, 0, 3)
        assert manager.step == 1
    torch.testing.assert_close(weights(model), before_minus(before, inner, 4))


def before_minus(before: list[torch.Tensor], inner: Any, steps: int) -> list[torch.Tensor]:
    """What SGD makes of ``before`` in ``steps`` inner steps of ``train``."""
    copies = [nn.Parameter(one) for one in before]
    plain = torch.optim.SGD(copies, lr=inner.param_groups[0]["lr"])
    for step in range(steps):
        train(plain, 0, step)
    return [one.detach() for one in copies]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_does_not_count(fused) -> None:
    """A fused optimizer steps, and skips the update itself."""
    manager = alone()
    model = module_of(SHAPE)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    diloco = DiLoCo(manager, [model], inner, torch.optim.SGD(model.parameters(), lr=1.0), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with diloco:
        for number, gradient in enumerate([1.0, float("inf"), 1.0]):
            assert manager.step == 0, number
            scaler.scale(model.p0.sum() * gradient).backward()
            scaler.step(inner)
            scaler.update()
            inner.zero_grad()
    assert manager.step == 1


def test_a_scheduler_of_the_inner_optimizer_and_an_evaluation_change_nothing() -> None:
    manager = alone()
    model, inner, diloco = make(manager, sync_every=2)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    with diloco:
        for step in range(4):
            train(inner, 0, step)
            scheduler.step()
            model.eval()
            model.train()
    assert manager.step == 2
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1 / 16)


def test_buffers_are_averaged_and_copied_at_the_end_of_a_period() -> None:
    def run(member: Member) -> dict[str, torch.Tensor]:
        model = nn.BatchNorm1d(1)
        manager: Any = member
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with LocalSGD(manager, model, inner, 2):
            for _ in range(2):
                model(torch.tensor([[1.0], [3.0]]) + 10 * member.rank).sum().backward()
                if member.rank:
                    model.num_batches_tracked += 5
                inner.step()
        return {name: one.clone() for name, one in model.named_buffers()}

    first, second = Groups(2).each(run)
    assert first["running_mean"].item() == pytest.approx(0.19 * 7)
    assert first["num_batches_tracked"] == 2
    for name, buffer in first.items():
        assert torch.equal(buffer, second[name]), name


def test_frozen_parameters_are_reduced_if_the_outer_optimizer_has_them() -> None:
    model = module_of([*SHAPE, ((3,), torch.float32)])
    model.p1.requires_grad_(False)
    manager = alone()
    inner = torch.optim.SGD([model.p0], lr=0.1)
    DiLoCo(manager, [model], inner, torch.optim.SGD(model.parameters(), lr=1.0), 1)
    assert any("p1" in line for line in manager.layout), "it may train later"
    manager = alone()
    DiLoCo(manager, [model], inner, torch.optim.SGD([model.p0], lr=1.0), 1)
    assert not any("p1" in line for line in manager.layout)


class Recorded(Codec):
    """Full precision; records what it is asked to do."""

    name = "recorded"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def allreduce(self, manager: Any, key: str, tensors: list[torch.Tensor]) -> Any:
        self.calls.append((key, len(tensors)))
        return [manager.allreduce(one) for one in tensors][-1]

    def _start(self, *_: Any) -> Any:
        raise AssertionError

    def settle(self, key: str, committed: bool) -> None:
        self.calls.append((key, committed))


def test_a_codec_averages_a_fragment_at_once_and_is_told_whether_its_result_is_used() -> None:
    manager, codec = Groups(1, rejected=[1]).members[0], Recorded()
    _, inner, diloco = make(manager, module_of(SHAPE * 3), 1, codec=codec)
    with diloco:
        for step in range(3):
            train(inner, 0, step)
    key = "StreamingDiLoCoFragment_0"
    assert codec.calls == [(key, 3), (key, True), (key, 3), (key, False), (key, 3), (key, True)]
    assert "codec recorded" in manager.layout


def test_momentum_of_the_outer_optimizer_is_warned_of_only_with_error_feedback(caplog) -> None:
    def build(codec: Codec | None, momentum: float) -> bool:
        caplog.clear()
        model = module_of(SHAPE)
        outer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
        DiLoCo(alone(), [model], torch.optim.SGD(model.parameters(), lr=0.1), outer, 2, codec=codec)
        return "use an outer optimizer without momentum" in caplog.text

    assert [build(TwoBit(), 0.9), build(TopK(0.5), 0.5)] == [True, True]
    assert [build(TwoBit(), 0.0), build(Quantized(), 0.9), build(None, 0.9)] == [False] * 3


def test_a_codec_is_told_of_an_outer_step_that_an_exception_ends() -> None:
    codec = Recorded()
    _, inner, diloco = make(alone(), sync_every=2, fragment_sync_delay=1, codec=codec)
    with pytest.raises(KeyError), diloco:
        train(inner, 0, 0)
        raise KeyError("batch")
    assert codec.calls[-1] == ("StreamingDiLoCoFragment_0", False)


def test_a_block_whose_first_quorum_failed_requests_it_again() -> None:
    """Else a group that joins would train a period before it heals."""
    manager = alone()
    manager.init_sync = True
    quorums: list[bool] = []

    def start_quorum() -> None:
        quorums.append(True)
        if len(quorums) == 1:
            raise KeepstepError("no lighthouse")

    manager.start_quorum = start_quorum
    _, _, diloco = make(manager)
    with pytest.raises(KeepstepError), diloco:
        diloco.begin()
    for _ in range(2):
        with diloco:
            for _ in range(2):
                diloco.begin()
    assert len(quorums) == 2, "once it has formed, the block joins no more"


def test_a_sync_that_heals_from_a_group_that_begins_its_period_averages_nothing() -> None:
    """That group does not average now: the collective would wait for it until its timeout."""
    manager = alone()
    model = module_of(SHAPE)
    block = LocalSGD(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    load, save = manager.states["LocalSGD"]
    source = save()
    begin = manager.start_quorum
    manager.start_quorum = lambda: (begin(), load(source))
    assert not block.sync()
    assert (manager.reductions, manager.open, manager.step) == ([], False, 0)
    manager.start_quorum = begin
    assert block.sync()


@pytest.fixture
def world() -> Iterator[None]:
    """Not with torch's Gloo: FSDP makes torch keep the world, sockets and all."""
    dist.Backend.register_backend("local-sgd-world", lambda *_: ProcessGroupDummy(), devices=["cpu"])
    dist.init_process_group("local-sgd-world", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_parameters_train_as_plain_ones(world) -> None:
    def run(*, sharded: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        if sharded:
            fully_shard(model)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(alone(), [model], inner, outer, 2, fragment_update_alpha=0.5) as diloco:
            for step in range(4):
                model(torch.full((4, 3), float(step))).square().sum().backward()
                inner.step()
                inner.zero_grad()
        return [extract_local_tensor(one) for one in model.parameters()], diloco.state_dict()

    (plain, state), (sharded, of_shards) = run(sharded=False), run(sharded=True)
    torch.testing.assert_close(sharded, plain)
    torch.testing.assert_close(
        of_shards["fragments"][0]["original_parameters"], state["fragments"][0]["original_parameters"]
    )


def test_a_local_tensor_is_a_copy_without_a_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    local = extract_local_tensor(parameter)
    local += 1
    assert local.grad is None
    assert not local.requires_grad
    assert parameter.tolist() == [1, 1]
