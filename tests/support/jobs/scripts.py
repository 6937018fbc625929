"""A replica group that runs scripts of ``examples/``, one after another; several scripts are a job each.

After each script it prints {"event": "finished", "script", "pid", "step", "digest", ...}. The digest covers the state
that the script registered with its Manager. Environment variables:

SCRIPTS      paths, separated by colons
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.support.jobs.trainer import digest, say


def main() -> None:
    torch.set_num_threads(1)
    scripts = [Path(path) for path in os.environ["SCRIPTS"].split(":")]
    for script in scripts:
        if len(scripts) > 1:
            os.environ["KEEPSTEP_JOB"] = script.stem
        names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
        outcome = ""
        try:
            exec(compile(script.read_text(), script, "exec"), names)
        except SystemExit as ended:
            outcome = str(ended)
            names["manager"].shutdown()
        model, adamw = names["model"], names["adamw"]
        say(
            "finished",
            script=script.stem,
            step=names["manager"].current_step(),
            digest=digest(*(_local(part.state_dict()) for part in (model, adamw))),
            outcome=outcome,
        )


def _local(state: Any) -> Any:
    """Replace DTensors by the shards of this rank."""
    if isinstance(state, dict):
        return {key: _local(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_local(value) for value in state]
    return state.to_local() if hasattr(state, "to_local") else state
