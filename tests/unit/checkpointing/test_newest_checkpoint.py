"""How the ranks of a group find the newest durable checkpoint, although relays or rank 0 are slow."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from keepstep.checkpointing.direct.connection import Endpoint
from keepstep.checkpointing.durable import newest_checkpoint
from keepstep.checkpointing.durable.due_checkpoints import Stored
from keepstep.checkpointing.durable.newest_checkpoint import find_newest
from keepstep.lifecycle.durability import RANK_0_ROUNDS, value_of_rank_0
from keepstep_mesh.errors import KeepstepError


def test_all_relays_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    relays = [Endpoint.of(f"http://relay{number}:1", dict) for number in range(3)]
    all_asked = threading.Barrier(len(relays))

    def stored_at(relay: Endpoint, _job: str) -> list[Stored]:
        all_asked.wait(5)
        return [Stored(relay.address, "step-1-1-a", 1, 1, 1, 0.0)]

    monkeypatch.setattr(newest_checkpoint, "stored_at", stored_at)
    assert [one.relay for one in find_newest(lambda: relays, "job", 0.0)] == [relay.address for relay in relays]


def test_a_rank_waits_for_rank_0_that_comes_later_to_its_first_step() -> None:
    store = HashStore()
    waits: list[int] = []

    def still_waiting() -> None:
        waits.append(1)
        if len(waits) == 2:
            store.set("choice", "{}")

    assert value_of_rank_0(store, "choice", 0.01, still_waiting) == b"{}"
    assert len(waits) == 2


def test_a_rank_does_not_wait_for_rank_0_for_ever() -> None:
    waits: list[int] = []
    with pytest.raises(KeepstepError, match=r"rank 0 of this group did not begin its first step within 0.1 s"):
        value_of_rank_0(HashStore(), "choice", 0.01, lambda: waits.append(1))
    assert len(waits) == RANK_0_ROUNDS
