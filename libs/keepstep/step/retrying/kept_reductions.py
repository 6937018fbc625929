"""Keep what the all-reduces of a step were given, so that they can be repeated.

A reduction replaces its tensor. So the tensor is copied right before its first reduction; a reduction that never
started needs no copy. A repeated reduction writes its result to the same tensor, which helps only if nothing has used
the result of the failed one. That is so for

* a tensor in the memory of a gradient, as a bucket of ``DistributedDataParallel`` is, which nothing has changed since
  the reduction ended. The version counter of the tensor shows changes, such as those of gradient clipping.
* a tensor whose result is used in ``write_back`` alone.

No counter shows that a script has read a result, or has written to it through ``.data`` or numpy. So the reductions are
repeated before the script sees a result (``Retries.finalize``), and none that it has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import Variable

from keepstep.process_group.works import writing
from keepstep.step.reduction import Reduction

BATCH_BY_NUMBER = (
    "the script asked for participating_rank(), and may have drawn its batch by it; among fewer groups the numbers are "
    "others"
)
HANDED_OUT = "the script has the results of earlier all-reduces of this step, and may have used them"
CHANGED = (
    "a gradient was changed after its all-reduce, and before the script could know its result; change gradients after "
    "backward(), or after the wait() of their all-reduces"
)


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


class KeptReduction:
    """One all-reduce of the present step."""

    def __init__(self, reduction: Reduction, copies: list[torch.Tensor | None], number: int) -> None:
        self.reduction = reduction
        self._copies = copies
        self._number = number
        self._saved = False
        self._version = _version(reduction.tensor)
        """Of the tensor, when the reduction ended, or was noted and did not start."""

    def save(self) -> None:
        """Copy the tensor, before its first reduction. The memory of the step before is used again."""
        tensor = self.reduction.tensor
        if self._saved or self.reduction.refill is not None:
            return
        copy = self._copies[self._number]
        if copy is None or (copy.shape, copy.dtype, copy.device) != (tensor.shape, tensor.dtype, tensor.device):
            copy = self._copies[self._number] = torch.empty_like(tensor, requires_grad=False)
        with torch.no_grad(), writing([copy]):
            copy.copy_(tensor)
        self._saved = True

    def ended(self) -> None:
        """Note that the reduction ended, with or without success. From any thread."""
        self._version = _version(self.reduction.tensor)

    def restore(self) -> None:
        """Give the tensor its contribution again."""
        tensor, copy = self.reduction.tensor, self._copies[self._number]
        if self.reduction.refill is not None:
            self.reduction.refill()
        elif self._saved and copy is not None:
            with torch.no_grad(), writing([tensor]):
                tensor.copy_(copy)
        self.ended()

    def obstacle(self, gradients: frozenset[int]) -> str:
        """Return why the reduction cannot be repeated; empty: it can be. ``gradients``: addresses of their memory."""
        tensor, reduction = self.reduction.tensor, self.reduction
        if reduction.write_back is None and _address(tensor) not in gradients:
            return (
                f"an all-reduce of a tensor of shape {tuple(tensor.shape)} is of no gradient, so its result may have "
                "been used already; reduce it after should_commit(), or pass write_back to Manager.allreduce"
            )
        return "" if _version(tensor) == self._version else CHANGED


class KeptReductions:
    """The all-reduces of the present step of this rank, in their order.

    Args:
        gradients: returns the gradients of the parameters that the script trains.
    """

    def __init__(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._gradients = gradients
        self._kept: list[KeptReduction] = []
        self._copies: list[torch.Tensor | None] = []
        """One for each reduction of the last step."""
        self._refused = ""

    def begin(self) -> None:
        """Begin another step. Copies that the step before did not need are freed."""
        del self._copies[len(self._kept) :]
        self._kept, self._refused = [], ""

    def note(self, reduction: Reduction) -> KeptReduction:
        """Note an all-reduce that the script starts."""
        number = len(self._kept)
        if number == len(self._copies):
            self._copies.append(None)
        kept = KeptReduction(reduction, self._copies, number)
        self._kept.append(kept)
        return kept

    def refuse(self, reason: str) -> None:
        """Do not retry the present step."""
        self._refused = self._refused or reason

    def obstacle(self) -> str:
        """Return why the reductions cannot be repeated; empty: they can be."""
        if self._refused:
            return self._refused
        gradients = frozenset(map(_address, self._gradients()))
        return next(filter(None, (one.obstacle(gradients) for one in self._kept)), "")

    def again(self) -> list[KeptReduction]:
        """Return the reductions to repeat, in their order."""
        return list(self._kept)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor; 0 for tensors of inference mode, which have none."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  torch has no public name for it
