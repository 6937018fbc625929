"""A script's object that hides the Manager inside it (``keepstep.lifecycle.manager_like``), in real groups."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, PureDistributedDataParallel
from tests.services.manager.groups import manager, together
from tests.services.manager.steps.test_retried_steps import lose_one

PASSED_ON = ("start_quorum", "allreduce", "should_commit", "errored", "report_error", "participating_rank")


class Hiding:
    """Has a few of torchft's methods, and no other attribute of the Manager inside."""

    def __init__(self, inside: Manager) -> None:
        for name in (*PASSED_ON, "num_participants", "current_step", "is_participating"):
            setattr(self, name, getattr(inside, name))


class TwoWeights(nn.Module):
    """Uses its second weight for large values only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.large = (nn.Linear(1, 1, bias=False) for _ in range(2))
        for one in self.parameters():
            nn.init.ones_(one)

    def forward(self, values: torch.Tensor) -> Any:
        found = self.always(values)
        return found + self.large(values) if values.max() > 3 else found


class HiddenTrainer:
    """Averages through an object that hides the Manager; its optimizer has the Manager itself."""

    def __init__(self, given: Manager, ddp: type[nn.Module]) -> None:
        self.model = TwoWeights()
        self.ddp = ddp(Hiding(given), self.model)
        self.optimizer = Optimizer(given, torch.optim.SGD(self.model.parameters(), lr=1.0))
        self.given = given

    @property
    def weight(self) -> torch.Tensor:
        return torch.stack([one.detach().flatten()[0] for one in self.model.parameters()]).sum()

    def backward(self, value: float) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.ddp(torch.full((1, 1), value)).sum())


@pytest.mark.parametrize("ddp", [DistributedDataParallel, PureDistributedDataParallel])
def test_groups_stay_equal_when_a_member_is_lost_and_one_group_used_a_weight_alone(
    lighthouse: str, ddp: type[nn.Module]
) -> None:
    found = lose_one(lighthouse, 2.0, 4.0, trainer=lambda given: HiddenTrainer(given, ddp))
    (committed, weight, _), other = found[0], found[1]
    assert (committed, weight) == other[:2]
    assert weight == pytest.approx(2 - 3 - 2 if committed else 2)


def test_buffers_are_averaged_when_model_and_optimizer_are_given_such_an_object(lighthouse: str) -> None:
    ready = threading.Barrier(2)

    def run(number: int) -> list[float]:
        with manager(lighthouse, f"r{number}", init_sync=False) as inside:
            hiding: Any = Hiding(inside)
            model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
            wrapped = DistributedDataParallel(hiding, model, average_buffers=["0.running_mean"])
            optimizer = Optimizer(hiding, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                ready.wait(30)
                optimizer.zero_grad()
                torch.autograd.backward(wrapped(torch.tensor([[1.0], [3.0]]) * (number + 1)).sum())
                assert optimizer.step()
                assert inside.num_participants() == 2
            return model.get_buffer("0.running_mean").tolist()

    assert together(lambda: run(0), lambda: run(1)) == [[3.0], [3.0]]
