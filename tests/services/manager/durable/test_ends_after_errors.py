"""The last durable checkpoint of scripts and interactive sessions in which an error happened. Each is a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.manager.durable.test_durable_checkpoints import listed
from tests.support.services.command import environment
from tests.support.services.relay_driver import DEADLINE, relay_process

TRAIN = """
import torch
from keepstep import Manager, ProcessGroupGloo
held = {{"w": torch.zeros(10)}}
manager = Manager(ProcessGroupGloo(), state_dict=lambda: dict(held), load_state_dict=held.update, init_sync=False,
    lighthouse_addr="{lighthouse}", replica_id="a", durable_every=2, durable_relays="{url}")
def train(steps):
    for _ in range(steps):
        manager.start_quorum()
        assert manager.should_commit()

"""
SESSION = TRAIN + "1 / 0\ntrain(1)\n1 / 0\n"
FALLBACK = TRAIN + "try:\n    1 / 0\nexcept ZeroDivisionError:\n    train(2)\n    manager.shutdown()\n"


@pytest.mark.parametrize(
    ("flags", "program", "saved"),
    [
        pytest.param(["-i"], SESSION + "train(1)\n1 / 0\nmanager.shutdown()\n", True, id="a cell failed before"),
        pytest.param(["-i"], SESSION + "train(1)\n1 / 0\n", True, id="the session ends"),
        pytest.param([], FALLBACK, True, id="the script trains while it handles an error"),
        pytest.param([], TRAIN + "train(2)\n", True, id="the script ends without a shutdown"),
        pytest.param([], TRAIN + "train(2)\n1 / 0\n", False, id="the error ends the script"),
        pytest.param(
            [], TRAIN + "try:\n    train(2)\n    1 / 0\nfinally:\n    manager.shutdown()\n", False, id="finally"
        ),
    ],
)
async def test_a_due_checkpoint_is_written_unless_the_script_ends_with_an_error(
    lighthouse: str, tmp_path: Path, flags: list[str], program: str, *, saved: bool
) -> None:
    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        code = program.format(lighthouse=lighthouse, url=url)
        words = (*flags, "-") if flags else ("-c", code)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *words), stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        async with asyncio.timeout(DEADLINE):
            _, errors = await process.communicate(code.encode() if flags else b"")
        assert process.returncode == (0 if saved else 1), errors
        assert (b"ZeroDivisionError" in errors) is (program is not FALLBACK and "1 / 0" in program), errors
        assert await listed(url) == ({2: "committed"} if saved else {})
