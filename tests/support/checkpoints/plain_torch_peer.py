"""A process that has torch, and nothing of keepstep: loads a checkpoint of the recipe from a relay, and prints its sum.

plain_torch_peer.py URL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn


def main(url: str) -> None:
    model = nn.Sequential()
    model.add_module("net1", nn.Linear(16, 16))
    model.add_module("relu", nn.ReLU())
    model.add_module("net2", nn.Linear(16, 8))
    state: dict[str, Any] = {"app": {"model": model.state_dict()}, "step": 0}
    dcp.load(state, checkpoint_id=url)
    model.load_state_dict(state["app"]["model"])
    assert "keepstep" not in sys.modules
    with torch.no_grad():
        print(json.dumps([state["step"], model(torch.ones(16)).tolist()]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
