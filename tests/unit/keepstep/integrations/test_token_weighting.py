"""Tokens of all groups count alike: the weights are those of torchrun, with Transformers from PyPI."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.coordination import LighthouseServer
from tests.support.network.ports import free_port

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    pytest.skip("transformers is not installed: pip install -e '.[transformers]'", allow_module_level=True)

SCRIPT = Path(__file__).parents[3] / "support" / "jobs" / "token_counts.py"


def weights(folder: Path, name: str, variables: Callable[[int], dict[str, str]], *more: str) -> list[torch.Tensor]:
    """Return the weights of both processes, one vector each."""
    files = [folder / f"{name}{number}" for number in range(2)]
    running = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(file), *more], env={**os.environ, **variables(number)})
        for number, file in enumerate(files)
    ]
    assert [one.wait(250) for one in running] == [0, 0]
    return [torch.cat([one.flatten() for one in torch.load(file).values()]) for file in files]


def trained(folder: Path, options: dict[str, Any], plain: dict[str, Any], **more: str) -> tuple[torch.Tensor, float]:
    """Train two groups with ``options``, and torchrun with ``plain``. Return our weights and the largest difference."""
    port = str(free_port())

    def of_torchrun(number: int) -> dict[str, str]:
        rank = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
        return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OPTIONS": json.dumps(plain), **more}

    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2)
    try:
        group = {"NUM_REPLICA_GROUPS": "2", "KEEPSTEP_LIGHTHOUSE": lighthouse.address(), "OPTIONS": json.dumps(options)}
        ours = weights(folder, "group", lambda number: {**group, "REPLICA_GROUP_ID": str(number), **more})
    finally:
        lighthouse.shutdown()
    expected, _ = weights(folder, "plain", of_torchrun, "plain")
    assert torch.equal(*ours)
    return ours[0], (ours[0] - expected).abs().max().item()


@pytest.mark.timeout(600)
def test_groups_with_15_and_2_tokens_reach_the_weights_of_torchrun(tmp_path: Path) -> None:
    """Slow: four processes import Transformers. One step has a group without a token in its last batch."""
    assert trained(tmp_path, {}, {})[1] < 1e-6


@pytest.mark.timeout(600)
def test_noise_on_embeddings_is_that_of_torchrun_and_arguments_of_its_ddp_and_loader_have_no_effect(
    tmp_path: Path,
) -> None:
    """Slow: as above."""
    noise = {"neftune_noise_alpha": 5.0}
    loader = {"accelerator_config": {"dispatch_batches": True}}
    ddp = {"ddp_bucket_cap_mb": 1, "ddp_find_unused_parameters": True, "ddp_broadcast_buffers": True}
    assert trained(tmp_path, {**noise, **loader, **ddp, "ddp_timeout": 77}, noise)[1] < 1e-6


@pytest.mark.timeout(600)
def test_batches_are_even_whatever_even_batches_says(tmp_path: Path) -> None:
    """Slow: as above. 11 samples; a step later the groups begin the second epoch."""
    uneven = {"max_steps": 6, "accelerator_config": {"even_batches": False}}
    assert trained(tmp_path, uneven, {"max_steps": 6}, SAMPLES="11")[1] < 1e-6


@pytest.mark.timeout(600)
def test_tokens_count_alike_in_float16_with_a_loss_scale(tmp_path: Path) -> None:
    """Slow: as above. The rounding of float16 differs, because each group computes the gradient of a sum."""
    half = {"fp16": True, "max_steps": 6, "max_grad_norm": 0.1}
    ours, difference = trained(tmp_path, half, half, LOSS_SCALE="1024")
    assert difference < 1e-3
    assert ours.isfinite().all()
