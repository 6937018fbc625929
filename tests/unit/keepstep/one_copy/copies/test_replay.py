import copy

import pytest
import torch
from torch import nn

from keepstep.one_copy.copies.rank_state import RankState
from keepstep.one_copy.copies.replay import REPLAYED, can_replay, replay

STEPS = 4


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 3, bias=False))


def gradients(model: nn.Module, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for index, one in enumerate(model.parameters()):
        one.grad = None if (index + step) % 4 == 0 else torch.randn(one.shape, generator=random)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", REPLAYED, ids=lambda kind: kind.__name__)
def test_a_keeper_repeats_the_steps_of_a_slice_bit_for_bit(kind: type[torch.optim.Optimizer], foreach: bool) -> None:
    model = model_of(1)
    first, *rest = model.parameters()
    optimizer = kind([{"params": [first]}, {"params": rest, "lr": 0.02}], lr=0.01, foreach=foreach)  # type: ignore[call-arg]
    state = RankState(model, optimizer)
    assert len(state.slices) > 1
    numbers = range(len(state.slices))
    bases = [copy.deepcopy(state.base(number)) for number in numbers]
    log: list[list[tuple[object, dict[str, torch.Tensor]]]] = [[] for _ in numbers]
    for step in range(STEPS):
        gradients(model, step)
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        for number in numbers:
            log[number].append((state.options(), {k: v.clone() for k, v in state.gradients(number).items()}))
        optimizer.step()
    for number in numbers:
        found = replay(kind, bases[number], log[number], torch.device("cpu"))
        for name, one in state.base(number).items():
            assert torch.equal(found[name]["parameter"], one["parameter"])
            assert found[name]["state"].keys() == one["state"].keys()
            for key, value in one["state"].items():
                assert torch.equal(torch.as_tensor(found[name]["state"][key]), torch.as_tensor(value)), key


def test_optimizers_that_mix_elements_and_subclasses_are_not_replayed() -> None:
    class Other(torch.optim.AdamW):
        pass

    weights = [nn.Parameter(torch.ones(2, 2))]
    assert can_replay(torch.optim.AdamW(weights))
    assert not can_replay(Other(weights))
    assert not can_replay(torch.optim.Adafactor(weights))
    assert not can_replay(torch.optim.LBFGS(weights))


def test_a_state_that_was_loaded_steps_on_as_the_one_that_it_is_from() -> None:
    models = [model_of(1), model_of(2)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in models]
    states = [RankState(*pair) for pair in zip(models, optimizers, strict=True)]
    gradients(models[0], 1)
    optimizers[0].step()
    states[1].load([states[0].base(number) for number in range(len(states[0].slices))], states[0].options())
    for model, optimizer in zip(models, optimizers, strict=True):
        gradients(model, 2)
        optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
