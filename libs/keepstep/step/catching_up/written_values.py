"""Notice which values of an optimizer's param groups a script writes between two steps, such as learning rates.

A script may set the learning rate of each step itself. A group that catches up replays each step with the values that
the script wrote for it; all other values come with the state, or change as the steps are replayed. A value that is
written counts, also if it is equal to the one before: the one that comes with the state may be another.

``mark`` therefore puts an equal float or tuple, but a new object, in the place of each. On the training thread.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

Written: TypeAlias = list[dict[str, Any]]
"""The values that were written, of each param group."""


class WrittenValues:
    """The values of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._marks: list[dict[str, tuple[object, int]]] = []
        """Each value, and the number of writes into it if it is a tensor."""

    def mark(self) -> None:
        """Count what is written from now on."""
        self._marks = []
        for group in self._optimizer.param_groups:
            for key, value in group.items():
                if type(value) is float:
                    group[key] = value * 1.0
                elif type(value) is tuple:
                    group[key] = (*value,)
            self._marks.append({key: _mark(value) for key, value in group.items() if key != "params"})

    def forget(self) -> None:
        """Count nothing until ``mark``."""
        self._marks = []

    def since_mark(self) -> Written:
        """Return copies of the values that were written since ``mark``; empty without one."""
        return [
            {key: _copy(group[key]) for key, mark in marks.items() if key in group and not _same(mark, group[key])}
            | {key: _copy(value) for key, value in group.items() if key not in marks and key != "params"}
            for group, marks in zip(self._optimizer.param_groups, self._marks, strict=False)
        ]

    def write(self, written: Written) -> None:
        """Write values that ``since_mark`` has returned."""
        for group, values in zip(self._optimizer.param_groups, written, strict=False):
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # a captured graph knows its memory
                else:
                    group[key] = _copy(value)


def _mark(value: object) -> tuple[object, int]:
    return value, value._version if isinstance(value, torch.Tensor) else 0  # noqa: SLF001  torch has no public name for it


def _same(mark: tuple[object, int], value: object) -> bool:
    now, writes = _mark(value)
    return now is mark[0] and writes == mark[1]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
