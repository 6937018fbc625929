"""A replica group that runs scripts of ``examples/``, one after another; several scripts are a job each.

After each script that ends with exit code 0 it prints {"event": "finished", "script", "pid", "step", "digest"}. The
digest covers model and optimizers; of a script with LocalSGD the model, and of one with DiLoCo the fragments, which are
equal in all groups.
Environment variables:

SCRIPTS      paths, separated by colons
ARGUMENTS    of the scripts, separated by spaces
PACE         seconds to sleep before each step of an ``Optimizer``: most steps only pass while a test waits
HOLD         file; while it exists, no script begins
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from keepstep import Optimizer


def main() -> None:
    torch.set_num_threads(1)
    sys.argv[1:] = os.environ.get("ARGUMENTS", "").split()
    if "PACE" in os.environ:
        slow_down(float(os.environ["PACE"]))
    while Path(os.environ.get("HOLD", "")).is_file():
        time.sleep(0.02)  # until the test, another process, lets it begin
    scripts = [Path(path) for path in os.environ["SCRIPTS"].split(":")]
    for script in scripts:
        if len(scripts) > 1:
            os.environ["KEEPSTEP_JOB"] = script.stem
        names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
        try:
            exec(compile(script.read_text(), script, "exec"), names)
        except SystemExit as end:
            if end.code:
                raise
            # else the group was drained
        manager = names["manager"] if "manager" in names else manager_of(names["trainer"])
        manager.shutdown()
        line = {
            "event": "finished",
            "script": script.stem,
            "pid": os.getpid(),
            "step": manager.current_step(),
            "digest": digest(shared_state(names)),
        }
        print(json.dumps(line), flush=True)


def slow_down(seconds: float) -> None:
    step = Optimizer.step

    def slowly(self: Optimizer, *given: Any) -> Any:
        time.sleep(seconds)
        return step(self, *given)

    Optimizer.step = slowly  # type: ignore[assignment,method-assign]


def manager_of(trainer: Any) -> Any:
    """Return the Manager of a Trainer of Lightning or of Transformers."""
    return trainer.strategy.manager if hasattr(trainer, "strategy") else trainer.manager


def shared_state(names: dict[str, Any]) -> object:
    """Return the state of a script that is equal in all groups."""
    if "diloco" in names:
        return names["diloco"].state_dict()["fragments"]
    if "LocalSGD" in names:
        return names["model"].state_dict()
    trainer: Any = names.get("trainer")
    if hasattr(trainer, "strategy") or hasattr(trainer, "optimizer"):  # of Lightning, or of Transformers
        optimizers = trainer.optimizers if hasattr(trainer, "strategy") else [trainer.optimizer]
        return [names["model"].state_dict(), [one.state_dict() for one in optimizers]]
    return [names["model"].state_dict(), names["adamw"].state_dict()]


def digest(state: object) -> str:
    """Return a digest of all values, and of this rank's shards of DTensors."""
    total = hashlib.sha256()
    for leaf in pytree.tree_leaves(state):
        leaf = leaf.to_local() if hasattr(leaf, "to_local") else leaf  # noqa: PLW2901
        total.update(leaf.detach().numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return total.hexdigest()


if __name__ == "__main__":
    main()
