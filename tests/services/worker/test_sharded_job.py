"""Several ranks save and load sharded state together."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

RANK = Path(__file__).parents[2] / "support" / "checkpoints" / "sharded_job.py"


def test_ranks_agree_and_a_model_goes_on_in_another_layout_with_the_same_losses(tmp_path):
    """Takes seconds: four ranks, which three process groups join, and three of which are killed in a save."""
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 0, -signal.SIGKILL, -signal.SIGKILL]
        assert said[1] == "ok\n"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
