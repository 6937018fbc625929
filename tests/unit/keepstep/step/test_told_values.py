"""Values of param groups come back from their text with the bits and types that they had."""

from __future__ import annotations

import contextlib
import math
import random
import socket
from types import SimpleNamespace

import pytest
import torch

from keepstep.group.agreement import StepValues
from keepstep.runtime.loop_thread import LoopThread
from keepstep.script_checks.common_values import CommonValues
from keepstep.step.catching_up import told_values
from keepstep.step.catching_up.told_values import ToldValues, write_told


def values_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    common, steps = CommonValues(), StepValues()
    common.add_optimizer(optimizer)
    steps.add(7, 3, common.of_step())
    return steps.lines()["7/3"]


def plain(group: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in group.items() if key != "params"}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop, torch.optim.NAdam])
def test_a_group_takes_the_step_with_the_values_that_the_others_had(kind):
    chance = random.Random(1)
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    theirs = kind([{"params": weights[:1]}, {"params": weights[1:2]}], lr=0.1)
    ours = kind([{"params": weights[2:3]}, {"params": weights[3:]}], lr=0.5)
    for group in theirs.param_groups:
        group["lr"] = math.nextafter(chance.random(), 1)
        group |= {key: 1e-300 * chance.random() for key in ("weight_decay",) if key in group}
        group["own count"] = chance.randrange(10)
        if "betas" in group:
            group["betas"] = (chance.random(), math.pi / 4)
    ours.param_groups[0]["own count"] = ours.param_groups[1]["own count"] = 99
    write_told(ours, values_of(theirs))
    assert [plain(one) for one in ours.param_groups] == [plain(one) for one in theirs.param_groups]
    assert all(type(one["own count"]) is int for one in ours.param_groups)


def test_a_tensor_keeps_its_memory_and_what_is_no_value_is_left_alone():
    weight = torch.nn.Parameter(torch.ones(2))
    rate = torch.tensor(0.25)
    optimizer = torch.optim.AdamW([weight], lr=rate)
    write_told(optimizer, {"AdamW param group 0 lr": "0.125", "AdamW param group 0 eps": "inf", "other": "1"})
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125
    assert optimizer.param_groups[0]["eps"] == 1e-8
    write_told(optimizer, {})
    assert rate.item() == 0.125


def test_a_group_that_does_not_answer_is_waited_for_once_and_not_for_each_step(monkeypatch):
    monkeypatch.setattr(told_values, "ANSWER_WAIT_SECONDS", 0.2)
    loop_thread = LoopThread()
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel accepts, and nothing reads
        context = SimpleNamespace(settings=SimpleNamespace(token=None, rank=0), loop_thread=loop_thread)
        values = ToldValues(context)
        address = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        assert [values.of(f"3/{step}", address) for step in range(5)] == [{}] * 5
        frozen.setblocking(False)
        connections = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                frozen.accept()[0].close()
                connections += 1
        assert 1 <= connections <= 2
        values.forget()
    loop_thread.stop()
