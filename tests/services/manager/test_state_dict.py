"""The state that a user registers, saves and loads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.services.manager.groups import events, manager, together


def test_a_state_key_is_registered_once(lighthouse):
    with manager(lighthouse, "a") as m:
        m.register_state_dict_fn("ema", lambda _: None, dict)
        with pytest.raises(ValueError, match="registered as 'ema' already"):
            m.register_state_dict_fn("ema", lambda _: None, dict)
        m.set_state_dict_fns(lambda _: None, dict)


def test_state_dict_goes_around_and_takes_what_torchft_wrote(lighthouse, steps):
    with manager(lighthouse, "a") as m:
        assert m.state_dict() == {"step": 0, "batches_committed": 0}
        m.load_state_dict({"step": 9, "batches_committed": 20})
        assert (m.current_step(), m.batches_committed()) == (9, 20)
        m.start_quorum()
        assert m.should_commit()
        saved = m.state_dict()
        assert saved["step"] == 10
        assert saved["lineage"] == "resumed:1:1"
        m.load_state_dict(saved)
        assert m.state_dict() == saved
    assert events(steps) == ["started", "loaded", "quorum", "committed", "loaded"]


def test_the_state_is_read_and_loaded_on_the_training_thread_only(lighthouse):
    ready = threading.Barrier(2)
    threads: dict[str, set[str]] = {"a": set(), "b": set()}

    def group(name: str) -> tuple[Any, ...]:
        weights = torch.ones(1)

        def save() -> dict[str, torch.Tensor]:
            threads[name].add(threading.current_thread().name)
            return {"w": weights}

        def load(_: object) -> None:
            threads[name].add(threading.current_thread().name)

        with manager(lighthouse, name, min_replica_size=2) as m:
            m.set_state_dict_fns(load, save)
            ready.wait(30)
            m.start_quorum()
            ready.wait(30)
            return m.should_commit(), threading.current_thread().name

    results = together(lambda: group("a"), lambda: group("b"))
    assert [committed for committed, _ in results] == [True, True]
    assert threads["a"] | threads["b"] == {thread for _, thread in results}
