"""Faults in a training step, on orders of ``keepstep chaos``: an exception, and a NaN among the contributions.

An order waits for the next step, or the next contribution, of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from keepstep_mesh.faults import fault_orders
from keepstep_mesh.faults.fault_orders import FaultOrders

FAULTY_STEP_SECONDS = 30.0
"""Longest wait of an order for a step."""


class InjectedError(RuntimeError):
    """Raised in a step because ``keepstep chaos`` ordered it."""


class StepFaults:
    """The faults that are ordered and have not hit. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ordered: dict[str, threading.Event] = {}
        self._orders: FaultOrders | None = None

    @staticmethod
    def accepted() -> StepFaults | None:
        """Return the faults of a process that accepts orders; None: it does not."""
        faults = StepFaults()
        acts = {"exception": lambda _: faults.order("exception"), "nan": lambda _: faults.order("nan")}
        faults._orders = fault_orders.accepted(acts)
        return None if faults._orders is None else faults

    def close(self) -> None:
        """Accept no further order."""
        if self._orders is not None:
            self._orders.close()

    @contextmanager
    def order(self, kind: str) -> Iterator[float]:
        """Wait until a fault has hit. RuntimeError: no step took it."""
        with self._lock:
            hit = self._ordered[kind] = threading.Event()
        try:
            if not hit.wait(FAULTY_STEP_SECONDS):
                raise RuntimeError(f"no step took the fault within {FAULTY_STEP_SECONDS:g} s")
            yield 0.0
        finally:
            with self._lock:
                self._ordered.pop(kind, None)

    def _take(self, kind: str) -> bool:
        with self._lock:
            hit = self._ordered.pop(kind, None)
        if hit is not None:
            hit.set()
        return hit is not None

    def raise_ordered(self) -> None:
        """Raise InjectedError in the thread that begins a step, if it is ordered."""
        if self._take("exception"):
            raise InjectedError("injected by `keepstep chaos`")

    def spoil(self, tensor: torch.Tensor) -> None:
        """Write a NaN into a contribution to a sum or an average, if it is ordered."""
        if tensor.numel() and self._take("nan"):
            tensor.detach().view(-1)[0] = float("nan")
