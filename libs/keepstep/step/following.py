"""The interface between a step and the catch-up of its group, which ``catching_up.catch_up`` implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.transfer.exchange import Exchange


class Follower(Protocol):
    """Follows the steps of other groups without weights, while their state arrives. On the training thread."""

    @property
    def source(self) -> str:
        """replica_id of the group that the state comes from; empty: none does."""

    def can_begin(self, plan: QuorumPlan) -> bool:
        """Return whether this group, which the plan tells to heal, follows instead. From any thread."""

    def objection(self, plan: QuorumPlan) -> Exception | None:
        """Return why no group must commit the step of ``plan``; None: it may commit. From any thread."""

    def hands_out(self, plan: QuorumPlan) -> None:
        """Begin to copy the state of this group, because another one takes it over in this step. From any thread."""

    def check(self, plan: QuorumPlan) -> None:
        """Give up, unless the group can go on with this plan."""

    def begin(self, plan: QuorumPlan, exchange: Exchange) -> None:
        """Follow from the step of ``plan`` on, which the group has taken part in, and which commits."""

    def followed(self, plan: QuorumPlan, participants: int, write_back: Callable[[], None]) -> None:
        """Note that a step was committed. ``write_back``: writes the averaged buffers of the step again."""

    def finish(self) -> None:
        """Wait for the state and replay all steps, or give up."""

    def close(self) -> None:
        """End the transfer. May be called more than once."""
