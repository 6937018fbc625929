"""A Manager over process groups that have only torch's contract, as those of torch >= 2.14."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Work

from keepstep import Manager, ProcessGroupGloo
from keepstep.process_group import ReconfigureOptions
from tests.services.manager.groups import manager, together


class OnlyReconfigure(dist.ProcessGroup):
    """Gloo without ``configure``, ``errored`` and the other methods of keepstep."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._inner = ProcessGroupGloo(timedelta(seconds=20))
        self.used: list[int] = []

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        return self._inner.get_reconfigure_handle()

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        self.used.append(opts.uuid)
        return self._inner.reconfigure(opts)

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._inner.allreduce(tensors, opts)

    def abort(self) -> None:
        self._inner.abort()

    def shutdown(self) -> None:
        self._inner.shutdown()


def test_groups_join_and_leave_over_torchs_contract_alone(lighthouse) -> None:
    """A third group joins two, and leaves again: each membership has another uuid, the same for all its members."""
    pgs = [OnlyReconfigure() for _ in range(3)]
    ready, begun = threading.Barrier(2), threading.Event()

    def step(m: Manager, value: float) -> tuple[int, float, bool]:
        m.start_quorum()
        tensor = torch.tensor([value])
        m.allreduce(tensor).wait()
        return m.num_participants(), tensor.item(), m.should_commit()

    def lasting(name: str, pg: OnlyReconfigure, value: float) -> list[tuple[int, float, bool]]:
        with manager(lighthouse, name, pg=pg, min_replica_size=2) as m:
            ready.wait(30)
            seen = [step(m, value)]
            begun.set()
            while (3, 4.0, True) not in seen or seen[-1] != (2, 3.0, True):
                seen.append(step(m, value))
            return seen

    def passing() -> tuple[int, float, bool]:
        begun.wait(30)
        with manager(lighthouse, "c", pg=pgs[2], min_replica_size=2) as m:
            step(m, 6.0)  # it heals
            return step(m, 6.0)

    a, b, c = together(lambda: lasting("a", pgs[0], 2.0), lambda: lasting("b", pgs[1], 4.0), passing)
    assert a[0] == b[0] == a[-1] == b[-1] == (2, 3.0, True)
    assert c == (3, 4.0, True)
    assert pgs[0].used == pgs[1].used
    assert len(set(pgs[0].used)) == len(pgs[0].used) >= 3
    assert set(pgs[2].used) <= set(pgs[0].used)


def test_a_process_group_that_cannot_change_its_members_is_refused_before_anything_connects(monkeypatch) -> None:
    monkeypatch.delenv("KEEPSTEP_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match=r"pg is a ProcessGroup, which cannot .* made with enable_reconfigure=True"):
        Manager(pg=dist.ProcessGroup(0, 1))
