"""The sockets at which processes accept faults, in a folder that containers share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest

from keepstep_chaos import fault_orders
from keepstep_chaos.fault_orders import FaultOrders

ELSEWHERE = 1 << 22
"""No process here has this id."""


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(20)
        yield listener


def test_sockets_of_killed_processes_are_removed_and_those_of_other_containers_stay(tmp_path: Path) -> None:
    living, dead = (tmp_path / f"keepstep-chaos-{ELSEWHERE}-{number}.sock" for number in (1, 2))
    with listening(dead):
        pass
    with listening(living) as other, closing(FaultOrders(tmp_path, {})):
        assert living.exists()
        assert not dead.exists()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(living))
            other.accept()[0].close()  # the probe left no connection before this one


def test_a_process_with_the_id_of_another_container_takes_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_orders, "_numbers", count(1))
    with listening(tmp_path / f"keepstep-chaos-{os.getpid()}-1.sock"), closing(FaultOrders(tmp_path, {})):
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f"keepstep-chaos-{os.getpid()}-{number}.sock" for number in (1, 2)
        ]
