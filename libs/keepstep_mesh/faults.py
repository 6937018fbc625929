"""Let ``keepstep chaos`` bring faults on this process from inside. Off unless ``KEEPSTEP_CHAOS`` names a folder.

``keepstep_chaos`` carries the orders out. It is loaded only where the variable is set.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Protocol

CHAOS_ENV = "KEEPSTEP_CHAOS"

Act = Callable[[float], AbstractContextManager[float]]
"""Takes the seconds of a fault. Its context begins the fault, gives the seconds for which the fault goes on by itself,
and undoes it at the end."""


class FaultOrders(Protocol):
    """Orders that a process accepts."""

    def close(self) -> None:
        """Accept no further order, and end an open fault. May be called more than once."""

    def end_fault(self) -> None:
        """End the open fault. From any thread."""

    def hang(self, kind: str, over: threading.Event) -> None:
        """Let this thread hang until ``over``. ``kind``: of fault."""


def accepted_orders(acts: Mapping[str, Act] | None = None) -> FaultOrders | None:
    """Accept orders for faults of any process, and for ``acts`` by kind.

    Returns:
        The orders; None: the variable is not set, or its folder does not work.
    """
    if not (folder := os.environ.get(CHAOS_ENV)):
        return None
    orders: FaultOrders | None = import_module("keepstep_chaos.fault_orders").opened(Path(folder), acts or {})
    return orders


@contextmanager
def accepting_faults() -> Iterator[None]:
    """Accept orders while the context is open, if the variable is set."""
    orders = accepted_orders()
    try:
        yield
    finally:
        if orders is not None:
            orders.close()
