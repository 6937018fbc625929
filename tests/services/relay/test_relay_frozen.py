"""A relay that freezes in a save: the ranks give up at their deadline, and what was committed stays."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointError, CheckpointNotFound
from keepstep.checkpoint.places import at_relay
from keepstep.checkpoint.places.at_relay import RelayTarget
from keepstep.connection.deadline import Deadline
from keepstep.relay_client.uploading import RelayUpload
from keepstep.state.errors import TransferTimeout
from tests.support.services.relay_driver import relay_process

TIMEOUT = timedelta(seconds=60)
SHORT = 0.3
"""Seconds that the ranks have left when the relay freezes."""
STAGES = ("plan", "write", "result", "commit")


def state(rank: int, value: int) -> dict[str, Any]:
    """Return a state without chunks of other values or ranks."""
    return {f"w{rank}": torch.full((3000,), value + rank / 2), "value": value}


def save(place: str, value: int) -> list[BaseException | None]:
    """Save on two ranks, and return the error of each."""
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(checkpoint.save, state(rank, value), place, rank=rank, world_size=2, timeout=TIMEOUT)
            for rank in range(2)
        ]
        return [one.exception() for one in ranks]


def check_loads(place: str, value: int) -> None:
    into = {f"w{rank}": torch.zeros(3000) for rank in range(2)} | {"value": 0}
    checkpoint.load(into, place, timeout=TIMEOUT)
    assert all(
        torch.equal(into[key], one) for rank in range(2) for key, one in state(rank, value).items() if key[0] == "w"
    )
    assert into["value"] == value


class Freezer:
    """Stops the relay when both ranks are before a stage of their save, and leaves them little time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stage = ""
        self._both = threading.Barrier(2)

    def arm(self, stage: str) -> None:
        self._stage = stage

    def reached(self, target: RelayTarget | RelayUpload, stage: str) -> None:
        if stage != self._stage:
            return
        if self._both.wait(60) == 0:
            os.kill(self._pid, signal.SIGSTOP)
            self._stage = ""  # they say at the end that they failed, which is a result too
        self._both.wait(60)
        target._link.close()  # open connections have the old deadline
        target._link.deadline = Deadline(SHORT, "it was not saved")


async def test_a_relay_that_freezes_at_any_stage_of_a_save_blocks_no_rank_and_keeps_what_is_committed(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(at_relay, "FAIL_SECONDS", SHORT)
    async with relay_process("--data-dir", str(tmp_path), "--upload-timeout", "1h") as (process, url):
        freezer = Freezer(process.pid)

        def stops_before(owner: type[RelayTarget | RelayUpload], name: str, stage: str) -> None:
            usual = getattr(owner, name)

            def method(self: RelayTarget | RelayUpload, *arguments: Any, **how: Any) -> Any:
                freezer.reached(self, stage)
                return usual(self, *arguments, **how)

            monkeypatch.setattr(owner, name, method)

        methods = ((RelayTarget, "exchange"), (RelayUpload, "put"), (RelayUpload, "report"), (RelayTarget, "commit"))
        for (owner, name), stage in zip(methods, STAGES, strict=True):
            stops_before(owner, name, stage)
        place = f"{url}/v1/jobs/j/checkpoints"
        assert await asyncio.to_thread(save, f"{place}/before", 0) == [None, None]
        for value, stage in enumerate(STAGES, 1):
            freezer.arm(stage)
            try:
                async with asyncio.timeout(60):
                    errors = await asyncio.to_thread(save, f"{place}/{stage}", value)
            finally:
                process.send_signal(signal.SIGCONT)
            for error in errors:
                assert isinstance(error, TransferTimeout | CheckpointError), (stage, error)
                assert "it was not saved" in str(error), (stage, error)
            await asyncio.to_thread(check_loads, f"{place}/before", 0)
            try:
                await asyncio.to_thread(check_loads, f"{place}/{stage}", value)
            except CheckpointNotFound:
                assert stage != "commit", "both ranks had reported it"
            else:
                assert stage in ("result", "commit"), "it can be committed only with both results"
        assert await asyncio.to_thread(save, f"{place}/after", 9) == [None, None]
        await asyncio.to_thread(check_loads, f"{place}/after", 9)
