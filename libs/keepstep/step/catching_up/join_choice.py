"""Decide whether a group that is behind catches up, or heals while the others wait for it. Pure.

``Optimizer(catch_up=None)``, the default, leaves the choice to keepstep. A group catches up if

* one optimizer of torch takes the steps, alone, and with nothing of the script between its gradients and the weights;
* the state is large enough for the others to notice the wait, and the memory holds it twice, and the gradients;
* its group has one rank: a rank cannot catch up alone when its script reads the weights.

Nothing relies on a replay: before the group counts, it takes over whatever differs from the state of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEAST_BYTES = 64 << 20
"""Smaller states arrive within 0.6 s over 1 Gbit/s: to heal costs the others less than to catch up."""
GRADIENT_SHARE = 2
"""Limit of the kept gradients, as a multiple of the state."""
MEMORY_SHARE = 1 + GRADIENT_SHARE
"""Memory that must be available, as a multiple of the state: for the state that arrives, and the gradients."""
NEARLY_HERE_SECONDS = 0.3
"""The others wait this long in all, if the state is then here."""
RATE_KNOWN_SECONDS = 0.1
"""After this time the rate of the transfer is known."""
NEXT_LOOK_SECONDS = 0.01
"""Time between two looks at the transfer."""

NO_OPTIMIZER = "no keepstep.Optimizer takes the steps"

MOMENTS: Mapping[str, int] = {
    "torch.optim.adadelta.Adadelta": 2,
    "torch.optim.adagrad.Adagrad": 1,
    "torch.optim.adam.Adam": 2,
    "torch.optim.adamax.Adamax": 2,
    "torch.optim.adamw.AdamW": 2,
    "torch.optim.asgd.ASGD": 1,
    "torch.optim.nadam.NAdam": 2,
    "torch.optim.radam.RAdam": 2,
    "torch.optim.rmsprop.RMSprop": 2,
    "torch.optim.rprop.Rprop": 2,
    "torch.optim.sgd.SGD": 1,
}
"""Optimizers whose steps are replayed, and the numbers that they keep for each parameter, at most. A step of theirs
changes each element by itself, in a fixed order, and communicates with no other process."""


@dataclass(frozen=True, slots=True)
class JoinFacts:
    """Facts about a script and its Manager."""

    ranks: int
    """Of a group."""
    asynchronous: bool
    """``use_async_quorum``"""
    background: bool
    """Whether the transport receives in the background."""
    transport: str
    """Its class."""
    trains_on: bool
    """Whether groups train while a quorum forms (``keepstep.outer``)."""
    optimizers: tuple[str, ...]
    """Class of each optimizer that a ``keepstep.Optimizer`` wraps, with its module; one at least."""
    wrapper: str
    """Class of the last of those."""


def obstacle(facts: JoinFacts) -> str:
    """Return why groups of such a job heal; empty: they may catch up."""
    if len(facts.optimizers) > 1:
        return f"the script has {len(facts.optimizers)} optimizers"
    if facts.wrapper != "OptimizerWrapper":
        return f"{facts.wrapper}, the optimizer of another trainer, takes the steps"
    if facts.optimizers[0] not in MOMENTS:
        return f"{facts.optimizers[0]} is not a known optimizer of torch"
    if facts.ranks > 1:
        return f"a group has {facts.ranks} ranks; with Optimizer(catch_up=True) it catches up"
    if not facts.asynchronous:
        return "use_async_quorum=False: all groups heal before the forward pass"
    if not facts.background:
        return f"{facts.transport} receives within a step"
    return "groups train while a quorum forms" if facts.trains_on else ""


def size_obstacle(state_bytes: int, available: int) -> str:
    """Return why this group heals now; empty: it may catch up.

    Args:
        state_bytes: size of the state, as far as it is known.
        available: main memory in bytes.
    """
    if state_bytes < LEAST_BYTES:
        return f"the state has {state_bytes:,} bytes, so that the others hardly wait (limit {LEAST_BYTES:,})"
    needed = MEMORY_SHARE * state_bytes
    if available < needed:
        return f"to catch up takes {needed:,} bytes of memory, and {available:,} are available"
    return ""


def patience(elapsed: float, received: int, total: int) -> float:
    """Return how many seconds to wait until the next look, for a state that is nearly here; 0: follow the others.

    Args:
        elapsed: seconds since the transfer began.
        received, total: bytes; 0, 0: it has not begun.
    """
    if elapsed >= NEARLY_HERE_SECONDS:
        return 0.0
    if elapsed >= RATE_KNOWN_SECONDS and elapsed * total > NEARLY_HERE_SECONDS * received:
        return 0.0
    return min(NEXT_LOOK_SECONDS, NEARLY_HERE_SECONDS - elapsed)
