"""The random number generators of this process: of torch, Python and NumPy."""

from __future__ import annotations

import array
import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the state of the generators of this process."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, array.array("Q", words).tobytes(), gauss],
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        if name == "MT19937":
            found["numpy"] = [keys.tobytes(), int(position), int(has_gauss), float(cached)]
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators of this process."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    numbers = array.array("Q")
    numbers.frombytes(words)
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state(("MT19937", numpy.frombuffer(keys, dtype="uint32"), position, has_gauss, cached))
