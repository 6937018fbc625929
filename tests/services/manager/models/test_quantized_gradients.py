"""Models whose gradients are averaged with 8-bit values."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Optimizer, ProcessGroupGloo, PureDistributedDataParallel
from tests.services.manager.groups import SECOND, manager, refusal, together

WRAPPERS = pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])


class Recording(ProcessGroupGloo):
    """Lists the collectives that it begins."""

    def __init__(self) -> None:
        super().__init__(timeout=20 * SECOND)
        self.began: list[str] = []

    def _run(self, operation, *args):
        self.began.append(operation)
        return super()._run(operation, *args)


@WRAPPERS
def test_groups_stay_equal_bit_for_bit_and_close_to_full_precision(lighthouse, wrapper):
    ready = threading.Barrier(2)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 4))

    def batch(name: str, step: int) -> torch.Tensor:
        return torch.randn(16, 30, generator=torch.Generator().manual_seed(step * 2 + (name == "b")))

    models = {name: model() for name in "ab"}  # the seed belongs to all threads

    def group(name: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        trained, pg = models[name], Recording()
        with manager(lighthouse, name, min_replica_size=2, init_sync=False, pg=pg) as m:
            wrapped = wrapper(m, trained, should_quantize=True)
            optimizer = Optimizer(m, torch.optim.SGD(trained.parameters(), lr=0.1))
            first = torch.zeros(0)
            for step in range(3):
                ready.wait(30)
                optimizer.zero_grad()
                wrapped(batch(name, step)).square().mean().backward()
                if step == 0:
                    first = trained[0].weight.grad.clone()
                assert optimizer.step()
            ready.wait(30)
        assert pg.began.count("alltoall_base") > 0
        return [tensor.detach().clone() for tensor in trained.state_dict().values()], first

    (ours, gradient), (theirs, _) = together(lambda: group("a"), lambda: group("b"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    exact = []
    for name in "ab":
        plain = model()
        plain(batch(name, 0)).square().mean().backward()
        exact.append(plain[0].weight.grad)
    mean = (exact[0] + exact[1]) / 2
    assert 0 < (gradient - mean).norm() <= 0.05 * mean.norm()


@WRAPPERS
def test_a_group_that_quantizes_alone_is_refused_by_the_name_of_the_setting(lighthouse, wrapper):
    message = refusal(
        lighthouse,
        lambda m: wrapper(m, nn.Linear(4, 2)),
        lambda m: wrapper(m, nn.Linear(4, 2), should_quantize=True),
    )
    assert ", should_quantize' in" not in message
    assert "should_quantize', in a" in message
