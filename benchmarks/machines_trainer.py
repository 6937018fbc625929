"""Train a tiny network as one rank of a group, for ``machines.py``, which says when to begin.

Arguments: the address of the lighthouse, the address of this machine, a file. Each committed step writes its Unix time
and the number of groups to the file.
"""

import importlib
import sys
import time
from pathlib import Path

import torch

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

for name in ("background_quorum", "durability", "membership", "steps", "wiring"):
    importlib.import_module(f"keepstep.lifecycle.{name}")  # the first Manager imports them

PAUSE_SECONDS = 0.01


def main(lighthouse: str, address: str, file: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("ready", flush=True)
    sys.stdin.readline()
    model = torch.nn.Linear(10, 10)
    sgd = torch.optim.SGD(model.parameters(), 1e-3)

    def load(state: dict[str, object]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        load_state_dict=load,
        lighthouse_addr=lighthouse,
        hostname=address,
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
    with Path(file).open("w", buffering=1) as commits:
        while True:
            optimizer.zero_grad()
            ddp(torch.randn(32, 10)).square().mean().backward()
            if optimizer.step():
                commits.write(f"{time.time()} {manager.num_participants()}\n")
            time.sleep(PAUSE_SECONDS)  # in place of loading data


main(*sys.argv[1:])
