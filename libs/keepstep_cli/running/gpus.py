"""Divide the GPUs of this machine among replica groups: ``CUDA_VISIBLE_DEVICES`` for each group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICE_FILE = re.compile(r"nvidia\d+")


def visible_gpus(environment: Mapping[str, str], device_folder: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs that a program with this environment can use, as ``CUDA_VISIBLE_DEVICES`` names them.

    Args:
        environment: its ``CUDA_VISIBLE_DEVICES`` decides, if it is set. CUDA ignores all names from the first invalid
            number on, such as -1.
        device_folder: folder with the driver's device files ``nvidia0`` ..., which are counted otherwise.
    """
    if (given := environment.get(VARIABLE)) is None:
        count = sum(DEVICE_FILE.fullmatch(one.name) is not None for one in device_folder.glob("nvidia*"))
        return tuple(str(number) for number in range(count))
    names: list[str] = []
    for name in (one.strip() for one in given.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def divide(gpus: tuple[str, ...], groups: int, each: int) -> list[str]:
    """Return ``CUDA_VISIBLE_DEVICES`` of each group: the next ``each`` of ``gpus``.

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
