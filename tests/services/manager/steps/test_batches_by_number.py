"""Batches drawn by number, as in docs/training.md: none is left out or trained twice, whichever groups take part."""

from __future__ import annotations

import threading
import urllib.request

import pytest
import torch

from keepstep import WorldSizeMode
from keepstep.coordination import LighthouseServer
from tests.services.manager.groups import manager, together

DEADLINE = 60
JSON = {"Content-Type": "application/json"}
MODES = [WorldSizeMode.FIXED_WITH_SPARES, WorldSizeMode.DYNAMIC]


@pytest.mark.parametrize("mode", MODES, ids=["fixed with spares", "dynamic"])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_committed_steps_train_every_batch_once_while_groups_come_and_go(mode, sync):
    server = LighthouseServer("127.0.0.1:0", min_replicas=3, join_timeout_ms=20_000)

    def let_two_go_on() -> None:
        change = urllib.request.Request(
            f"{server.address()}/v1/jobs/default", b'{"min_replicas": 2}', JSON, method="PATCH"
        )
        urllib.request.urlopen(change, timeout=60).close()

    trained: list[int] = []
    four, eight, twenty = threading.Barrier(3, let_two_go_on), threading.Event(), threading.Barrier(3)
    back = threading.Event()

    def train(name: str, first: int, last: int) -> int:
        options = {"world_size_mode": mode, "min_replica_size": 2, "use_async_quorum": not sync}
        with manager(server.address(), name, **options) as m:
            if first == 8:
                back.set()  # from here on the lighthouse waits for its request
            while m.current_step() < last:
                m.start_quorum()
                rank = m.participating_rank()
                number = m.batches_committed() + (rank or 0)
                m.allreduce(torch.ones(1)).wait()
                if m.should_commit() and rank is not None:
                    trained.append(number)
                if m.current_step() == 4 and first == 0:
                    four.wait(DEADLINE)  # the group that leaves must not cost the others that step
                if m.current_step() == 8:
                    eight.set()
                    assert back.wait(DEADLINE)  # else two groups may be done before the third is back
            if last == 20:
                twenty.wait(DEADLINE)
            return m.batches_committed()

    def leaves_and_comes_back() -> int:
        train("a", 0, 4)
        assert eight.wait(DEADLINE)
        return train("a", 8, 20)

    try:
        total = together(leaves_and_comes_back, lambda: train("b", 0, 20), lambda: train("c", 0, 20))
    finally:
        server.shutdown()
    assert len(set(total)) == 1
    assert sorted(trained) == list(range(total[0]))
