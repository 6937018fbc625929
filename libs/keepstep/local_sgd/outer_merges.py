"""The outer steps of decoupled groups: those that are ready merge a fragment, and those that are behind catch up.

An outer step has these collectives, the same in all its groups:

1. a header: the sum of the weights, and the bytes of 3;
2. the average of the pseudo-gradients. Each group multiplies its own by its share, so that the average is weighted;
3. if a group is behind: all originals and outer optimizers, of a group that is not.

Nothing changes before the step has committed. A step that fails leaves the parameters as the group trained them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp, Work

from keepstep.local_sgd.decoupled import Decoupled, fragment_of, share_of
from keepstep.local_sgd.merged_fragment import MergedFragment
from keepstep.state.state_bytes import load_state, save_state

if TYPE_CHECKING:
    from keepstep.manager import Manager

LENGTH_BYTES = 8
"""Of the length of the manifest, before it."""
ALIGNMENT = 8
"""The state is sent as 64-bit integers: a sum with zeros has no carry."""


class OuterMerges:
    """The outer steps of one group.

    Args:
        manager: of this replica group.
        settings: of the job.
        fragments: of the model.
        period: inner steps after which the group is ready.
        device: of tensors that the process group can reduce.
    """

    def __init__(
        self,
        manager: Manager,
        settings: Decoupled,
        fragments: Sequence[MergedFragment],
        period: int,
        device: torch.device,
    ) -> None:
        self._manager = manager
        self._settings = settings
        self._fragments = list(fragments)
        self._limit = settings.max_periods * period
        self._device = device
        self._counted = settings.weight_by == "steps"

    def count_step(self) -> None:
        """Count an inner step."""
        if self._settings.weight_by == "steps":
            self._count(1)

    def count_tokens(self, tokens: float) -> None:
        """See ``DiLoCo.count_tokens``."""
        if self._settings.weight_by != "tokens":
            raise RuntimeError("contributions are weighed by steps: pass Decoupled(weight_by='tokens')")
        if not 0 <= tokens < float("inf"):
            raise ValueError(f"tokens={tokens} must be a number from 0 on")
        self._counted = True
        self._count(tokens)

    def _count(self, weight: float) -> None:
        for fragment in self._fragments:
            fragment.weight += weight

    @property
    def weights(self) -> list[float]:
        """The weight of each fragment's progress."""
        return [fragment.weight for fragment in self._fragments]

    def load_weights(self, weights: Sequence[float]) -> None:
        """Load ``weights``."""
        for fragment, weight in zip(self._fragments, weights, strict=True):
            fragment.weight = float(weight)

    def is_due(self, inner_steps: int) -> bool:
        """Return whether the group merges now. All ranks of a group get the same answer.

        Args:
            inner_steps: since the last outer step; at least one period.
        """
        if not self._counted:
            raise RuntimeError(
                f"no tokens were counted in {inner_steps} inner steps: call count_tokens() in each of them, or pass "
                f"Decoupled(weight_by='steps')"
            )
        if inner_steps >= self._limit:
            return True  # the step waits for its quorum
        self._manager.background.request()
        return self._manager.background.formed()

    def merge(self) -> bool:
        """Take the outer step whose quorum has formed. Return whether it committed."""
        manager = self._manager
        standing = manager.background.standing()
        manager.mark_synchronized()
        for one in self._fragments:
            one.resolve(standing.step)
        fragment = self._fragments[fragment_of(standing.step, len(self._fragments))]
        state = _to_bytes([one.state_dict() for one in self._fragments]) if standing.gives_state else torch.empty(0)
        header = torch.tensor([fragment.weight, float(len(state))], dtype=torch.float64, device=self._device)
        received: torch.Tensor | None = None
        contributed = committed = False
        try:
            if manager.allreduce(header, reduce_op=ReduceOp.SUM).wait():
                total, size = header.tolist()
                fragment.begin(share_of(fragment.weight, total, manager.num_participants()))
                contributed = True
                if standing.anyone_behind:
                    received, copied = self._copy(state, int(size))
                    copied.wait()
                fragment.wait()
            with manager.committing() as committed:
                if committed:
                    if standing.behind and received is not None:
                        self._catch_up(received)
                    fragment.adopt()
            if not committed and contributed:
                fragment.fail(standing.step)
        finally:
            fragment.settle(committed=committed)
        return committed

    def start_over(self) -> None:
        """The group has loaded the state of another one."""
        for fragment in self._fragments:
            fragment.start_over()

    def _copy(self, state: torch.Tensor, size: int) -> tuple[torch.Tensor, Work]:
        """Start to copy ``state`` to all groups. ``size``: its bytes, also in groups that do not have it."""
        carrier = torch.zeros(-(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=self._device)
        carrier[: len(state)] = state.to(self._device)
        return carrier[:size], self._manager.allreduce(carrier.view(torch.int64), reduce_op=ReduceOp.SUM)

    def _catch_up(self, received: torch.Tensor) -> None:
        for fragment, state in zip(self._fragments, _from_bytes(received), strict=True):
            fragment.catch_up(state)


def _to_bytes(state: Any) -> torch.Tensor:
    manifest, pack = save_state(state)
    whole = b"".join((len(manifest).to_bytes(LENGTH_BYTES, "little"), manifest, pack))
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def _from_bytes(received: torch.Tensor) -> Any:
    whole = received.cpu().numpy().data
    end = LENGTH_BYTES + int.from_bytes(whole[:LENGTH_BYTES], "little")
    return load_state(bytes(whole[LENGTH_BYTES:end]), whole[end:])
