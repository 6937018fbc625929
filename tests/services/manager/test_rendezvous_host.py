"""Where the members of a quorum meet: a host that does not answer fails one rebuild, not all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from keepstep.coordination import LighthouseServer
from tests.services.manager.groups import SECOND, manager, together


@pytest.fixture
def three_needed() -> Iterator[str]:
    """A lighthouse whose quorums have at least three groups."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=3, join_timeout_ms=20_000)
    yield server.address()
    server.shutdown()


def test_after_a_host_that_never_answers_the_members_meet_at_another(three_needed, monkeypatch):
    done = threading.Barrier(3)

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    def group(name: str) -> tuple[int, bool]:
        """The quorum_id of the first step that commits, and whether one did."""
        with manager(three_needed, name, timeout=4 * SECOND) as m:
            if name != "c":  # accepts what peers ask at the rendezvous, and never answers
                monkeypatch.setattr(m._context.link.key_values, "execute", never)
            quorum_id, committed = 0, False
            for _ in range(4):
                m.start_quorum()
                m.allreduce(torch.ones(1)).wait()
                quorum_id = m.steps.current().wait_plan().quorum_id
                if committed := m.should_commit():
                    break
            done.wait(60)
            return quorum_id, committed

    outcomes = together(*[lambda name=name: group(name) for name in "abc"])
    assert outcomes == [(2, True)] * 3, "quorum 1 meets at b, quorum 2 at c"
