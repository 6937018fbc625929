"""A DTensor travels as the shard that its rank holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PEER = Path(__file__).parents[2] / "support" / "checkpoints" / "sharded_peer.py"


def test_each_rank_restores_its_shard_in_place_and_no_other(tmp_path):
    command = [sys.executable, str(PEER)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        assert [rank.communicate(timeout=100)[0] for rank in ranks] == ["ok\n", "ok\n"]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
