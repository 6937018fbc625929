"""The end of a backward pass, after its gradients are complete and before the script goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import Variable


def at_end_of_backward(act: Callable[[], object]) -> bool:
    """Let ``act`` run at the end of the backward pass in progress. Return False if this thread is in none.

    It runs after the callbacks that are queued by then: torch's DDP and FSDP2 complete the gradients in theirs.
    """
    queue: Any = Variable._execution_engine.queue_callback  # noqa: SLF001
    try:
        queue(lambda: queue(act))
    except RuntimeError:  # torch: final callbacks can only be installed during a backward pass
        return False
    return True
