"""Ranks of one group meet in a store of another process, of this one, of torchrun's agent, or of rank 0."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.services.manager.groups import manager, place_to_meet, together

SERVE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process() -> Iterator[int]:
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.communicate(timeout=60)


@contextmanager
def this_process() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    yield store.port
    assert store.check(["keepstep/0/group_server"]), "the group met elsewhere"


def serve_by(who: str) -> Any:
    return this_process() if who in {"this process", "agent"} else another_process()


def assert_group_commits(lighthouse: str, place: dict[str, Any]) -> None:
    def rank(number: int) -> bool:
        with manager(lighthouse, "g", rank=number, **place) as m:
            m.start_quorum()
            return m.should_commit()

    assert together(lambda: rank(0), lambda: rank(1)) == [True, True]


@pytest.mark.parametrize("who", ["this process", "another process", "agent"])
def test_a_group_joins_a_store_that_somebody_else_serves_in_each_of_its_lives(lighthouse, monkeypatch, who):
    if who == "agent":
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with serve_by(who) as port:
        for _life in range(2):
            assert_group_commits(lighthouse, place_to_meet() | {"store_port": port})


def test_rank_0_serves_the_store_of_a_group_when_nobody_does(lighthouse):
    place = place_to_meet()
    for _life in range(2):
        assert_group_commits(lighthouse, place)


def test_rank_0_with_a_fixed_port_replaces_the_entry_of_its_earlier_life(lighthouse, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_MANAGER_PORT", str(place_to_meet()["store_port"]))
    with another_process() as port:
        for _life in range(2):
            assert_group_commits(lighthouse, place_to_meet() | {"store_port": port})
