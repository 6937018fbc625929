"""Tokens of all groups count alike: the weights are those of torchrun, with Transformers from PyPI."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from keepstep.coordination import LighthouseServer
from tests.support.network.ports import free_port

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    pytest.skip("transformers is not installed: pip install -e '.[transformers]'", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "support" / "jobs" / "token_counts.py"


def weights(folder: Path, name: str, variables: Callable[[int], dict[str, str]], *more: str) -> list[torch.Tensor]:
    """Return the weights of both processes, one vector each."""
    files = [folder / f"{name}{number}" for number in range(2)]
    running = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(file), *more], env={**os.environ, **variables(number)})
        for number, file in enumerate(files)
    ]
    assert [one.wait(250) for one in running] == [0, 0]
    return [torch.cat([one.flatten() for one in torch.load(file).values()]) for file in files]


@pytest.mark.timeout(600)
def test_groups_with_15_and_2_tokens_reach_the_weights_of_torchrun(tmp_path: Path) -> None:
    """Slow: four processes import Transformers. One step has a group without a token in its last batch."""
    port = str(free_port())

    def of_torchrun(number: int) -> dict[str, str]:
        rank = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
        return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2)
    try:
        group = {"NUM_REPLICA_GROUPS": "2", "KEEPSTEP_LIGHTHOUSE": lighthouse.address()}
        ours = weights(tmp_path, "group", lambda number: {**group, "REPLICA_GROUP_ID": str(number)})
    finally:
        lighthouse.shutdown()
    expected, _ = weights(tmp_path, "plain", of_torchrun, "plain")
    assert torch.equal(*ours)
    assert (ours[0] - expected).abs().max() < 1e-6
