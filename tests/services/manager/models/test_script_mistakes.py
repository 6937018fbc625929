"""A script that trains different models is told so by its Manager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from tests.services.manager.groups import manager, together


def test_a_forward_pass_that_bypasses_the_wrapper_is_named_once(lighthouse, caplog):
    def group(name: str) -> None:
        model = nn.Linear(3, 1)
        with manager(lighthouse, name, min_replica_size=2) as m:
            m.set_state_dict_fns(model.load_state_dict, model.state_dict)
            ddp = DistributedDataParallel(m, model)
            optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=0.1))
            for model_or_ddp in (ddp, model, model):
                optimizer.zero_grad()
                model_or_ddp(torch.ones(2, 3)).sum().backward()
                assert optimizer.step()
                if model_or_ddp is ddp:
                    assert "remedy" not in caplog.text, "so far the script is correct"

    together(lambda: group("a"), lambda: group("b"))
    warnings = [record.getMessage() for record in caplog.records if "remedy" in record.getMessage()]
    assert len(warnings) == 2, "one in each group"
    assert all("no gradients averaged" in one and "ddp(x)" in one for one in warnings)


def test_a_state_dict_without_its_counterpart_is_refused(lighthouse):
    with pytest.raises(ValueError, match="load_state_dict is missing"):
        Manager(ProcessGroupGloo(), state_dict=dict, lighthouse_addr=lighthouse)
