"""Faults that a step takes on an order."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from keepstep.step.step_faults import InjectedError, StepFaults


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepFaults]:
    monkeypatch.setenv("KEEPSTEP_CHAOS", str(tmp_path))
    accepted = StepFaults.accepted()
    assert accepted is not None
    yield accepted
    accepted.close()


def ordered(faults: StepFaults, folder: Path, kind: str) -> socket.socket:
    """The connection of an order that waits for a step."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    (path,) = folder.iterdir()
    connection.connect(str(path))
    connection.sendall(json.dumps({"kind": kind, "seconds": 0}).encode() + b"\n")
    until(lambda: kind in faults._ordered)
    return connection


def until(true) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # nothing signals it


def test_a_step_takes_a_fault_and_the_order_is_answered_at_once(faults: StepFaults, tmp_path: Path) -> None:
    with ordered(faults, tmp_path, "exception") as connection:
        with pytest.raises(InjectedError):
            faults.raise_ordered()
        assert json.loads(connection.recv(1000)) == {"error": ""}
    faults.raise_ordered()


def test_an_order_whose_connection_closes_hits_no_later_step(faults: StepFaults, tmp_path: Path) -> None:
    ordered(faults, tmp_path, "exception").close()
    until(lambda: not faults._ordered)
    faults.raise_ordered()  # raises nothing
    assert not faults._ordered


def test_a_contribution_that_is_not_contiguous_is_spoiled(faults: StepFaults, tmp_path: Path) -> None:
    for spoiled in (torch.zeros(3, 2).t(), torch.zeros(())):
        with ordered(faults, tmp_path, "nan"):
            faults.spoil(spoiled)
        assert spoiled.isnan().sum() == 1
