"""Notice that the gradients of a slice are there, while the backward pass of the others goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from keepstep.one_copy.copies.rank_state import RankState, local

LONGEST_PAUSE = 64
"""Number of steps without a look at gradients, after steps in which they were changed later."""
PARTS = 4
"""Slices are announced in so many parts at most, because each wakes a thread."""


class EarlyGradients:
    """Gradients that come in a backward pass, of parameters in main memory.

    A gradient may come several times in a step, so that it counts as complete when it came as often as in the
    step before. It may still change afterwards: by clipping, or by another number of passes.

    Args:
        tensors: model and optimizer of this rank.
        come: called with the numbers of slices whose gradients are all there, in the backward pass.
    """

    def __init__(self, tensors: RankState, come: Callable[[list[int]], None]) -> None:
        self._come = come
        self._ready: list[int] = []
        self._least = -(-len(tensors.slices) // PARTS)
        self._slice_of: dict[int, int] = {}
        self._expected: Counter[int] = Counter()
        self._times: Counter[int] = Counter()
        """How often each gradient came in this step, by the index of its parameter."""
        self._missing: Counter[int] = Counter()
        """Number of gradients that are missing, by slice."""
        self._watching = False
        self._pause = self._steps_left = 0
        self._hooks = []
        for number, indices in enumerate(tensors.slices):
            for index in indices:
                one = tensors.parameters[index]
                if one.requires_grad and tensors.is_trained(index) and local(one).device.type == "cpu":
                    self._slice_of[index] = number
                    hook = one.register_post_accumulate_grad_hook(partial(self._note, index))  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)

    def begin(self) -> None:
        """Begin a step."""
        self._times = Counter()
        self._missing, self._ready = Counter(self._slice_of[index] for index in self._expected), []
        self._watching = self._steps_left == 0
        self._steps_left = max(0, self._steps_left - 1)

    def end(self, *, changed: bool) -> None:
        """End a step that went through to its end.

        Args:
            changed: gradients were changed after they were complete. Some steps are left out then, and more of them
                each time.
        """
        self._expected = self._times
        if changed:
            self._pause = self._steps_left = min(LONGEST_PAUSE, 2 * self._pause or 1)
        elif self._watching:
            self._pause = 0

    def _note(self, index: int, _: torch.Tensor) -> None:
        self._times[index] += 1
        if self._watching and self._times[index] == self._expected[index]:
            number = self._slice_of[index]
            self._missing[number] -= 1
            if not self._missing[number]:
                self._ready.append(number)
            if len(self._ready) >= self._least:
                ready, self._ready = self._ready, []
                self._come(ready)

    def close(self) -> None:
        """Notice nothing more."""
        for one in self._hooks:
            one.remove()
