"""Report of a script in this folder: the guess beside the output, and an exit status of 1 if the output changed."""

import os
import sys
from importlib.metadata import version
from typing import Any


def show_versions(*packages: str) -> None:
    """Print the installed version of each package, on rank 0."""
    if is_first_rank():
        print(", ".join(f"{package} {version(package)}" for package in packages), flush=True)


def compare(subject: str, *, guess: object, seen: object, known: object) -> None:
    """Print, on rank 0, the guess and the output, and end the process with 1 if the output is no longer the known one.

    Args:
        subject: The measured values, for a reader who has not seen the script.
        guess: Output that an engineer expects who knows the documentation.
        seen: Output of this run.
        known: Output when the script was written.
    """
    if not is_first_rank():
        return
    print(f"{subject}\n  guess: {guess}\n  seen:  {seen}", flush=True)
    if seen != known:
        sys.exit(f"  changed: was {known}")


def of_all_ranks(value: object) -> list[Any]:
    """Return the value that each rank passed, in the order of ranks."""
    import torch.distributed as dist  # scripts without ranks do not install torch

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
