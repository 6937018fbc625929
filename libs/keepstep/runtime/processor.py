"""The kind of processor that a process computes with, for a warning if it is another than that of most groups."""

from __future__ import annotations

from pathlib import Path

import torch

_UNKNOWN = "unknown processor"


def processor() -> str:
    """Return the model of the first GPU of this machine, else of the CPU. It does not initialize CUDA."""
    if torch.version.cuda:
        for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
            if model := _value(file, "Model"):
                return model
    return _value(Path("/proc/cpuinfo"), "model name") or _UNKNOWN


def _value(file: Path, name: str) -> str:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")
