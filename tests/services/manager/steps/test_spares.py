"""A Manager that stands by waits in its first ``start_quorum``, whatever state its script has loaded."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from datetime import timedelta

import pytest
import torch

from tests.services.manager.groups import manager, until_connected
from tests.services.manager.steps.test_first_quorum import order, ranks_of, step

SOON = timedelta(milliseconds=300)
DEADLINE = 60


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_spare_with_a_checkpoint_waits_for_its_place_and_for_no_time_limit(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    monkeypatch.setenv("KEEPSTEP_SPARES", "1")
    has_place, done = threading.Event(), threading.Barrier(ranks)
    in_time: list[bool] = []

    def spare(**place: object) -> None:
        with manager(lighthouse, "b", **place) as one:
            one.load_state_dict({"step": 7, "batches_committed": 7})
            one.start_quorum(timeout=SOON)
            in_time.append(has_place.is_set())
            one.allreduce(torch.ones(1)).wait()
            assert one.should_commit()
            done.wait(DEADLINE)

    with manager(lighthouse, "a") as a:
        assert step(a)
        threads = [threading.Thread(target=rank) for rank in ranks_of(ranks, spare)]
        for thread in threads:
            thread.start()
        until_connected(lighthouse, "b")
        deadline = time.monotonic() + DEADLINE
        while state_of_b(lighthouse) != "spare":
            assert time.monotonic() < deadline, state_of_b(lighthouse)
            time.sleep(0.01)  # nothing tells a client of the lighthouse that a spare waits
        time.sleep(3 * SOON.total_seconds())  # the limit of a request, which does not end the wait of a spare
        assert not in_time
        has_place.set()
        order(lighthouse, "a/evict")
        for thread in threads:
            thread.join(DEADLINE)
    assert in_time == [True] * ranks


def state_of_b(lighthouse: str) -> str:
    with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default/replicas/b", timeout=60) as answer:
        return str(json.load(answer)["state"])


def test_more_spares_than_groups_are_an_error(lighthouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    monkeypatch.setenv("KEEPSTEP_SPARES", "2")
    with (
        pytest.raises(ValueError, match="KEEPSTEP_SPARES=2 must be less than NUM_REPLICA_GROUPS"),
        manager(lighthouse, "a"),
    ):
        pass
