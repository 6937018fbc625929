"""Faults in a training step, on orders of ``keepstep chaos``: an exception, a hang, and a NaN among the contributions.

An order waits for the next step, or the next contribution, of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from keepstep_mesh.faults import Act, FaultOrders, accepted_orders

HANGS = ("hang", "hang-loop")
FAULTY_STEP_SECONDS = 30.0
"""Longest wait of an order for a step."""


class InjectedError(RuntimeError):
    """Raised in a step because ``keepstep chaos`` ordered it."""


class StepFaults:
    """The faults that are ordered and have not hit. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ordered: set[str] = set()
        self._over = threading.Event()
        """Ends a hang."""
        self._orders: FaultOrders | None = None

    @staticmethod
    def accepted() -> StepFaults | None:
        """Return the faults of a process that accepts orders; None: it does not."""
        faults = StepFaults()
        acts: dict[str, Act] = {kind: partial(faults.hang, kind) for kind in HANGS}
        acts |= {"exception": lambda _: faults.order("exception"), "nan": lambda _: faults.order("nan")}
        faults._orders = accepted_orders(acts)
        return None if faults._orders is None else faults

    def close(self) -> None:
        """Accept no further order."""
        if self._orders is not None:
            self._orders.close()

    @contextmanager
    def order(self, kind: str) -> Iterator[float]:
        """Let the next step have a fault, which ends the order when it hits. RuntimeError: no step took it."""
        with self._lock:
            self._ordered.add(kind)
        try:
            yield FAULTY_STEP_SECONDS
        finally:
            with self._lock:
                waits = kind in self._ordered
                self._ordered.discard(kind)
        if waits:
            raise RuntimeError(f"no step took the fault within {FAULTY_STEP_SECONDS:g} s")

    @contextmanager
    def hang(self, kind: str, seconds: float) -> Iterator[float]:
        """Let the thread that begins the next step hang until so many seconds from now. RuntimeError: none did."""
        with self._lock:
            self._over = threading.Event()
            self._ordered.add(kind)
        try:
            yield seconds
        finally:
            with self._lock:
                waits = kind in self._ordered
                self._ordered.discard(kind)
                self._over.set()
        if waits:
            raise RuntimeError(f"no step began within {seconds:g} s")

    def _take(self, kind: str) -> bool:
        with self._lock:
            if kind not in self._ordered:
                return False
            self._ordered.remove(kind)
            if self._orders is not None and kind not in HANGS:
                self._orders.end_fault()
        return True

    def raise_ordered(self) -> None:
        """Raise InjectedError in the thread that begins a step, or let it hang, if it is ordered."""
        for kind in HANGS:
            if self._orders is not None and self._take(kind):
                self._orders.hang(kind, self._over)
        if self._take("exception"):
            raise InjectedError("injected by `keepstep chaos`")

    def spoil(self, tensor: torch.Tensor) -> None:
        """Write a NaN into a contribution to a sum or an average, if it is ordered."""
        if tensor.numel() and self._take("nan"):
            tensor.detach()[(0,) * tensor.dim()] = float("nan")
