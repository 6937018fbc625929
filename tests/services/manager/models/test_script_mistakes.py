"""The Manager warns of a script that trains different models."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from tests.services.manager.groups import manager, together


def test_a_forward_pass_that_bypasses_the_wrapper_is_named_once_and_the_weights_are_found_to_differ(lighthouse, caplog):
    ready = threading.Barrier(2)

    def group(name: str) -> None:
        model = nn.Linear(3, 1)
        with manager(lighthouse, name, min_replica_size=2) as m:
            m.set_state_dict_fns(model.load_state_dict, model.state_dict)
            ddp = DistributedDataParallel(m, model)
            optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=0.1))
            ready.wait(30)
            for model_or_ddp in (ddp, *[model] * 11):
                optimizer.zero_grad()
                model_or_ddp(torch.full((2, 3), float(ord(name)))).sum().backward()
                assert optimizer.step()
                if model_or_ddp is ddp:
                    assert "remedy" not in caplog.text, "so far the script is correct"

    together(lambda: group("a"), lambda: group("b"))
    warnings = [record.getMessage() for record in caplog.records if "remedy" in record.getMessage()]
    mistakes = [one for one in warnings if one.startswith("no gradients averaged")]
    assert len(mistakes) == 2, "one in each group"
    assert all("ddp(x)" in one for one in mistakes)
    found = [one for one in warnings if one.startswith("weights of groups differ")]
    assert len(found) == len(warnings) - 2 == 4, "after the steps 3 and 10, in each group"
    differ = [record for record in caplog.records if record.getMessage().startswith("replicas_differ")]
    assert [(one.levelname, one.getMessage().partition(" step=")[2][:2].strip()) for one in differ] == [
        ("ERROR", "3"),
        ("ERROR", "10"),
    ]


def test_a_state_dict_without_its_counterpart_is_refused(lighthouse):
    with pytest.raises(ValueError, match="load_state_dict is missing"):
        Manager(ProcessGroupGloo(), state_dict=dict, lighthouse_addr=lighthouse)


@pytest.mark.parametrize("scaled", [False, True], ids=["step", "GradScaler"])
def test_a_plain_optimizer_whose_wrapper_began_the_step_is_refused(lighthouse, scaled):
    model = nn.Linear(3, 1)
    with manager(lighthouse, "a") as m:
        ddp = DistributedDataParallel(m, model)
        adamw = torch.optim.AdamW(model.parameters())
        optimizer = Optimizer(m, adamw)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        adamw.zero_grad()
        adamw.step()  # between two steps it is the script's own
        before = model.weight.clone()
        optimizer.zero_grad()
        scaler.scale(ddp(torch.ones(2, 3)).sum()).backward()
        with pytest.raises(RuntimeError, match=r"call step\(\) of the keepstep.Optimizer around it"):
            scaler.step(adamw)
        assert torch.equal(model.weight, before)


def test_a_manager_that_was_shut_down_in_a_step_refuses_no_step_of_the_optimizer(lighthouse):
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with manager(lighthouse, "a") as m:
        ddp = DistributedDataParallel(m, model)
        Optimizer(m, sgd).zero_grad()
        ddp(torch.ones(2, 3)).sum().backward()  # the step is open, as after Ctrl-C in a notebook
        assert m.steps.open_number is not None
    before = model.weight.clone()
    sgd.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    sgd.step()
    torch.testing.assert_close(model.weight, before - 0.2)


def test_an_optimizer_of_another_package_that_steps_without_its_wrapper_is_refused_after_it(lighthouse):
    class Descent(torch.optim.SGD):
        """Overrides ``step``, which might call the wrapper as torchtitan's container of optimizers does."""

        def step(self, closure=None):
            return super().step(closure)

    model = nn.Linear(3, 1)
    with manager(lighthouse, "a") as m:
        ddp, descent = DistributedDataParallel(m, model), Descent(model.parameters(), lr=0.1)
        optimizer = Optimizer(m, descent)
        optimizer.zero_grad()
        ddp(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match=r"Descent.step\(\) was called before the step has committed"):
            descent.step()
        assert m.torn, "its weights are those of no step"
