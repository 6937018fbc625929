"""Facts about the machine for the report: GPUs, driver, and versions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

import torch

DRIVER_SECONDS = 20.0
"""Limit of ``nvidia-smi``, which takes seconds on a machine with many GPUs."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``gpus``: their names. ``nccl``: version; None: torch was built without it. ``driver``: empty: unknown."""

    gpus: tuple[str, ...]
    driver: str
    nccl: tuple[int, ...] | None
    torch: str
    cuda: str
    python: str
    host: str

    @classmethod
    def this(cls) -> Machine:
        """Return the facts about this machine. Creates no CUDA context: the ranks are processes of their own."""
        has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        return cls(
            gpus=tuple(_gpu_names()) if has_nccl else (),
            driver=_driver(),
            nccl=_nccl_version() if has_nccl else None,
            torch=torch.__version__,
            cuda=torch.version.cuda or "none",
            python=platform.python_version(),
            host=f"{os.cpu_count()} CPU cores, Linux {platform.release()}",
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the facts as rows of a table."""
        nccl = "none" if self.nccl is None else ".".join(map(str, self.nccl))
        gpus = ", ".join(f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus)) or "none"
        return [
            ("GPUs", gpus),
            ("driver", self.driver or "none"),
            ("NCCL", nccl),
            ("torch", f"{self.torch} (CUDA {self.cuda})"),
            ("Python", self.python),
            ("host", self.host),
        ]


def why_no_gpu() -> str:
    """Return why the checks cannot run on a GPU of this machine; empty: they can."""
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return ""


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())


def _gpu_names() -> list[str]:
    names = _nvidia_smi("name")
    count = torch.cuda.device_count()
    return names[:count] if len(names) >= count else [f"GPU {number}" for number in range(count)]


def _driver() -> str:
    return next(iter(_nvidia_smi("driver_version")), "")


def _nvidia_smi(field: str) -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.stdout.splitlines() if line.strip()]
