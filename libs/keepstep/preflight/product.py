"""Matrix products that show a processor that computes wrong.

* One of whole numbers, whose sums are exact in every order: all processors have the same result, which is known.
* One of fractions, whose result depends on the order of the sums. Processors of one kind, with the same libraries and
  number of threads, have the same bits; the lighthouse compares those of the groups.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from keepstep.runtime.processor import processor

Multiply: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SIZE = 512
TIMES = 3
"""Number of products of fractions. Only a machine that has the same bits in all of them is compared."""
LIBRARIES = ("MKL_", "OMP_", "KMP_", "DNNL_", "ONEDNN_", "OPENBLAS_", "CUBLAS_", "NVIDIA_TF32", "TORCH_", "ATEN_")
"""Beginnings of the environment variables that select the code of a product."""


def own_device() -> torch.device:
    """Return the GPU of this rank, by ``LOCAL_RANK``; without GPUs the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = os.environ.get("LOCAL_RANK", "")
    return torch.device("cuda", int(local) % torch.cuda.device_count() if local.isdecimal() else 0)


def wrong_bytes(device: torch.device, multiply: Multiply = torch.matmul) -> int:
    """Return how many bytes of the product of whole numbers differ from the known result.

    Args:
        device: that multiplies.
        multiply: two float32 matrices of SIZE rows and columns.
    """
    numbers = torch.arange(SIZE)
    left, right = numbers[:, None] * 7 % 13 + numbers % 5 - 8, numbers[:, None] % 5 + numbers * 3 % 11 - 7
    # row of left: u[i] + v[k]; column of right: v[k] + w[j], all of them whole: the sum over k has a closed form
    u, v, w = numbers * 7 % 13 - 8, numbers % 5, numbers * 3 % 11 - 7
    known = SIZE * u[:, None] * w + (u[:, None] + w) * v.sum() + (v * v).sum()
    product = multiply(left.float().to(device), right.float().to(device)).cpu()
    differ = product.contiguous().view(torch.uint8) != known.float().contiguous().view(torch.uint8)
    return int(differ.sum())


def comparable_product(device: torch.device, multiply: Multiply = torch.matmul) -> str:
    """Return ``CONDITIONS=DIGEST`` of the product of fractions; empty: this machine has no bits of its own to compare.

    Products with equal conditions are equal bit for bit on machines without a fault.
    """
    numbers = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE)
    left, right = (numbers * 37 % 251).float() / 251 - 0.5, (numbers * 101 % 257).float() / 257 - 0.5
    left, right = left.to(device), right.to(device)
    digests = set()
    for _ in range(TIMES):
        product = multiply(left, right).cpu().contiguous()
        digests.add(hashlib.blake2b(product.numpy().data, digest_size=8).hexdigest())
    return f"{_conditions(device)}={digests.pop()}" if len(digests) == 1 else ""


def _conditions(device: torch.device) -> str:
    """Return the processor, the release of torch, and a digest of all else that the bits depend on."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    details: list[object] = [
        torch.version.cuda or torch.version.hip,
        torch.get_float32_matmul_precision(),
        *sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(LIBRARIES)),
    ]
    if device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        details += [torch.backends.cpu.get_cpu_capability(), _instructions(), cores]
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    digest = hashlib.blake2b(repr(details).encode(), digest_size=4).hexdigest()
    return f"{kind}, torch {torch.__version__}{threads}, {digest}"


def _instructions() -> str:
    """Return the instruction sets of the CPU: libraries select their code by them, and virtual machines hide some."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
