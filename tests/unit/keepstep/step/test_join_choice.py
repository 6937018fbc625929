"""Which jobs catch up by default, and how long a group waits for a state that is nearly here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keepstep.step.catching_up import join_choice
from keepstep.step.catching_up.join_choice import JoinFacts, obstacle, patience, size_obstacle

FACTS = JoinFacts(
    ranks=1,
    asynchronous=True,
    background=True,
    transport="RelayTransport",
    trains_on=False,
    optimizers=("torch.optim.adamw.AdamW",),
    wrapper="OptimizerWrapper",
)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"ranks": 2}, "a group has 2 ranks"),
        ({"asynchronous": False}, "use_async_quorum=False"),
        ({"background": False, "transport": "PGTransport"}, "PGTransport receives within a step"),
        ({"trains_on": True}, "groups train while a quorum forms"),
        ({"optimizers": FACTS.optimizers * 2}, "the script has 2 optimizers"),
        ({"optimizers": ("script.MyAdam",)}, "script.MyAdam is not a known optimizer of torch"),
        ({"wrapper": "ClosureOptimizer"}, "ClosureOptimizer, the optimizer of another trainer"),
    ],
)
def test_a_job_catches_up_if_one_optimizer_of_torch_takes_its_steps(changes, why):
    found = obstacle(replace(FACTS, **changes))
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_each_known_optimizer_is_one_of_torch_and_keeps_at_most_as_many_numbers_as_said():
    for name, moments in join_choice.MOMENTS.items():
        module, _, kind = name.rpartition(".")
        known = getattr(torch.optim, kind)
        assert (known.__module__, known.__qualname__) == (module, kind)
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer = known([weight], lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
        weight.grad = torch.ones(1000)
        optimizer.step()
        kept = sum(one.numel() for one in optimizer.state[weight].values() if torch.is_tensor(one))
        assert moments - 1 < kept / 1000 < moments + 0.01


def test_a_small_state_heals_and_so_does_one_that_leaves_no_memory():
    assert size_obstacle(64 * MIB, 192 * MIB) == ""
    assert "the state has 160 bytes" in size_obstacle(160, 1 << 40)
    assert "takes 201,326,592 bytes of memory, and 201,326,591" in size_obstacle(64 * MIB, 192 * MIB - 1)


def test_the_others_wait_only_for_a_state_that_arrives_within_the_limit():
    assert 0 < patience(0.0, 0, 0) <= 0.3, "the rate is not known yet"
    assert patience(0.1, 10 * MIB, 1024 * MIB) == 0, "10 s"
    assert patience(0.1, 512 * MIB, 1024 * MIB) > 0, "0.2 s"
    assert patience(0.1, 0, 1024 * MIB) == 0
    assert patience(0.29, 1000 * MIB, 1024 * MIB) == pytest.approx(0.01)
    assert patience(0.3, 1024 * MIB, 1024 * MIB) == 0
