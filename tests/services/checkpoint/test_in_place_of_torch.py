"""Saves and loads of torch, those of keepstep in their place, and those of torch with keepstep as storage."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.support.checkpoints.in_place_peer import WORLD

PEER = Path(__file__).parents[2] / "support" / "checkpoints" / "in_place_peer.py"


async def test_four_ranks_save_and_load_in_each_of_three_ways(tmp_path):
    """Starts four processes that import torch's distributed checkpoints."""
    ranks = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, str(PEER), str(rank), str(tmp_path / "store"), str(tmp_path / "places")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for rank in range(WORLD)
    ]
    try:
        async with asyncio.timeout(110):
            ended = await asyncio.gather(*(rank.communicate() for rank in ranks))
        assert [printed for printed, _ in ended] == [b"ok\n"] * WORLD, b"\n".join(log for _, log in ended).decode()
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
                await rank.wait()
