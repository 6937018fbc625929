"""Device for which a process group is built."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import torch

from keepstep.group.quorum_plan import make_plan
from keepstep.process_group import ProcessGroupDummy
from keepstep.rendezvous.store_client import KeyValueServer
from keepstep.step.reconfigurer import Reconfigurer
from keepstep_mesh.protocol.membership import Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum

OWN = "http://127.0.0.1:1"


async def test_a_process_group_is_built_for_the_device_of_the_step_and_not_for_that_of_the_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current, built = [0], []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # CUDA, ROCm or XPU
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch.accelerator, "set_device_index", built.append)
    server = KeyValueServer()
    reconfigurer = Reconfigurer(
        ProcessGroupDummy(),
        job="job",
        replica_id="g0",
        group_rank=0,
        group_world_size=1,
        token=None,
        host="127.0.0.1",
        key_values=server,
        own_address=OWN,
        timeout=timedelta(seconds=20),
    )
    current[0] = 3  # the script calls set_device after it made its Manager
    reconfigurer.use_current_device()
    member = Member("g0", 0, 0, 0, shrink_only=False, info=MemberInfo(OWN, OWN))
    plan = make_plan(Quorum(0, 1, 7, 0, 0, 0, 0, 0, uniform=True, listed=(member,)), "g0")
    assert await asyncio.wait_for(reconfigurer.follow(plan), 20)
    assert built == [3]
    reconfigurer.shutdown()
    server.close()
