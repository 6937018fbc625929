"""Several ranks save and load sharded state together."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from tests.support.services.relay_driver import relay

RANK = Path(__file__).parents[2] / "support" / "checkpoints" / "sharded_job.py"


async def test_ranks_agree_and_a_model_goes_on_in_another_layout_with_the_same_losses(tmp_path):
    """Takes seconds: four ranks, which three process groups join, and three of which are killed in a save."""
    async with relay(data_dir=tmp_path / "relay") as server:
        command = [sys.executable, str(RANK)]
        ranks = [
            await asyncio.create_subprocess_exec(
                *command, str(rank), str(tmp_path), server.address, stdout=asyncio.subprocess.PIPE
            )
            for rank in range(4)
        ]
        try:
            async with asyncio.timeout(100):
                said = [await rank.communicate() for rank in ranks]
            assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 0, -signal.SIGKILL, -signal.SIGKILL]
            assert said[1][0] == b"ok\n"
        finally:
            for rank in ranks:
                if rank.returncode is None:
                    rank.kill()
                await rank.wait()
