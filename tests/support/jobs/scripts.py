"""A replica group that runs scripts of ``examples/``, one after another; several scripts are a job each.

After each script it prints {"event": "finished", "script", "pid", "step", "digest"}. The digest covers model and
optimizer. Environment variables:

SCRIPTS      paths, separated by colons
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree


def main() -> None:
    torch.set_num_threads(1)
    scripts = [Path(path) for path in os.environ["SCRIPTS"].split(":")]
    for script in scripts:
        if len(scripts) > 1:
            os.environ["KEEPSTEP_JOB"] = script.stem
        names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
        with contextlib.suppress(SystemExit):  # drained
            exec(compile(script.read_text(), script, "exec"), names)
        names["manager"].shutdown()
        line = {
            "event": "finished",
            "script": script.stem,
            "pid": os.getpid(),
            "step": names["manager"].current_step(),
            "digest": digest([names["model"].state_dict(), names["adamw"].state_dict()]),
        }
        print(json.dumps(line), flush=True)


def digest(state: object) -> str:
    """Return a digest of all values, and of this rank's shards of DTensors."""
    total = hashlib.sha256()
    for leaf in pytree.tree_leaves(state):
        leaf = leaf.to_local() if hasattr(leaf, "to_local") else leaf  # noqa: PLW2901
        total.update(leaf.detach().numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return total.hexdigest()


if __name__ == "__main__":
    main()
