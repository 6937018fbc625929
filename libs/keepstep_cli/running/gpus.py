"""Divide the GPUs of this machine among replica groups: ``CUDA_VISIBLE_DEVICES`` for each group.

AMD's ROCm reads this variable too, unless one of its own is set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VARIABLE, OF_ROCM, BELOW_ROCM = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
DEVICE_FILE = re.compile(r"nvidia\d+")
NODES_OF_ROCM = Path("/sys/class/kfd/kfd/topology/nodes")
"""A folder for each processor; ``gpu_id`` in it is 0 for a CPU."""


def variable_of(environment: Mapping[str, str]) -> str:
    """Return the variable that selects GPUs in this environment."""
    return OF_ROCM if {OF_ROCM, BELOW_ROCM} & environment.keys() else VARIABLE


def visible_gpus(
    environment: Mapping[str, str], device_folder: Path = Path("/dev"), nodes: Path = NODES_OF_ROCM
) -> tuple[str, ...]:
    """Return the GPUs that a program with this environment can use, as ``variable_of`` names them.

    Args:
        environment: its variable decides, if it is set. CUDA ignores all names from the first invalid number on, such
            as -1.
        device_folder: folder with NVIDIA's device files ``nvidia0`` ..., which are counted otherwise.
        nodes: those of AMD's driver, which are counted if NVIDIA's has none and ``ROCR_VISIBLE_DEVICES`` is not set.
    """
    if (given := environment.get(variable_of(environment))) is None:
        count = sum(DEVICE_FILE.fullmatch(one.name) is not None for one in device_folder.glob("nvidia*"))
        if not count and (shown := environment.get(BELOW_ROCM)) is not None:
            count = len([one for one in shown.split(",") if one.strip()])
        elif not count:
            count = sum(one.read_text().strip() not in ("", "0") for one in nodes.glob("*/gpu_id"))
        return tuple(str(number) for number in range(count))
    names: list[str] = []
    for name in (one.strip() for one in given.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def divide(gpus: tuple[str, ...], groups: int, each: int) -> list[str]:
    """Return the value of ``variable_of`` for each group: the next ``each`` of ``gpus``.

    Raises:
        ValueError: the GPUs do not suffice.
    """
    if groups * each > len(gpus):
        seen = f"{len(gpus)} ({', '.join(gpus)})" if gpus else "no GPU"
        raise ValueError(f"{groups} groups with {each} GPUs each need {groups * each} GPUs; this machine shows {seen}")
    return [",".join(gpus[group * each : (group + 1) * each]) for group in range(groups)]


def advice(gpus: tuple[str, ...], groups: int) -> str | None:
    """Return a warning if several groups would use the same GPU because the command does not divide them."""
    if groups < 2 or not gpus:
        return None
    which = "GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    fix = f"; --gpus-per-replica {len(gpus) // groups} gives each group its own" if len(gpus) >= groups else ""
    return f"all {groups} groups see the same {which}, and a script that uses cuda:0 puts them on one{fix}"
