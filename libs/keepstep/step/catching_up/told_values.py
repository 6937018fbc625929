"""The values with which the others took the steps that this group replays, such as learning rates, as they tell them.

A script may change them anywhere, in a scheduler for example, whose steps a group that catches up does not take. Every
group keeps the values of its last steps as text (``agreement.StepValues``); floats are exact in it.
"""

from __future__ import annotations

import ast
import concurrent.futures
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from keepstep.group.group_peers import told_values
from keepstep.step.catching_up.written_values import Written
from keepstep.step.context import StepContext

ANSWER_WAIT_SECONDS = 2.0
"""Limit for an answer. Without it the replay uses other values, and the group heals."""
MAX_KEPT = 100_000
"""Steps of which the values are kept."""

Gradients = list[torch.Tensor | None]
Told = dict[str, str]


class Taken(NamedTuple):
    """How the others have taken a step."""

    gradients: Gradients
    """Averaged, one for each parameter."""
    written: Written
    """Values of param groups that the script wrote for this step."""
    told: tuple[str, str]
    """Name of the step in ``StepValues``, and address of a group that has its values."""


class ToldValues:
    """The values of the steps that this group follows. On the training thread."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._steps: dict[str, Told] = {}
        self._asking: concurrent.futures.Future[dict[str, Told]] | None = None
        self._silent: set[str] = set()
        """Addresses that did not answer in time: the other groups would wait for each step that is replayed."""

    def ask(self, address: str) -> None:
        """Ask the group served at ``address`` for the values of its last steps, unless an answer is awaited."""
        self._take(0.0)
        if self._asking is None:
            settings = self._context.settings
            asking = told_values(address, settings.token, settings.rank, ANSWER_WAIT_SECONDS)
            self._asking = self._context.loop_thread.spawn(asking)

    def of(self, key: str, address: str) -> Told:
        """Return the values of the step ``key``, as ``StepValues`` names it; empty: they are not known in time."""
        answered = address in self._silent
        for _ in range(2):  # an answer that is awaited may be older than the step
            if key not in self._steps and address not in self._silent:
                self.ask(address)
                answered |= self._take(ANSWER_WAIT_SECONDS)
        if key not in self._steps and not answered:
            self._silent.add(address)
        return self._steps.pop(key, {})

    def forget(self) -> None:
        """Forget all steps."""
        self._steps.clear()
        self._silent.clear()
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _take(self, seconds: float) -> bool:
        """Take the answer that is awaited. Return whether it came, and tells anything."""
        if self._asking is None or not (seconds or self._asking.done()):
            return False
        try:
            found = self._asking.result(seconds)
        except (TimeoutError, concurrent.futures.CancelledError):
            found = {}
        self._asking = None
        if len(self._steps) < MAX_KEPT:
            self._steps.update(found)
        return bool(found)


def write_told(optimizer: Optimizer, told: Told) -> None:
    """Write the values of one step into the param groups of ``optimizer``, in the types that these have there."""
    for number, group in enumerate(optimizer.param_groups):
        title = f"{type(optimizer).__name__} param group {number} "
        for key in group:
            if (text := told.get(f"{title}{key}")) is not None and key != "params":
                _write(group, key, text)


def _write(group: dict[str, Any], key: str, text: str) -> None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):  # an infinity
        return
    held = group[key]
    if isinstance(held, torch.Tensor):
        if held.item() != value:
            with torch.no_grad():
                held.fill_(value)
    elif held != value:
        group[key] = _typed(value, held)


def _typed(value: Any, held: Any) -> Any:
    """Return ``value``, whose numbers are floats, in the type of ``held``."""
    if isinstance(held, (list, tuple)) and isinstance(value, tuple) and len(held) == len(value):
        return type(held)(_typed(one, other) for one, other in zip(value, held, strict=True))
    if type(held) is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
