"""The requests of this rank for quorums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from keepstep.group.compared_layout import ComparedLayout
from keepstep.step.progress import GroupProgress
from keepstep.step.reconfigurer import Reconfigurer
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.membership import StateRoot, StepReport
from keepstep_mesh.protocol.records import maker

_make_ask = maker(RankAsk)


class Asks:
    """Builds the requests of this rank, and has what the next one reports.

    Args:
        progress: of the group.
        compared: the layout and the settings of this rank.
        reconfigurer: of this process.
        checkpoint: returns the metadata of the transport, for groups that heal from this one.
        stands_by: as the field.
    """

    def __init__(
        self,
        progress: GroupProgress,
        compared: ComparedLayout,
        reconfigurer: Reconfigurer,
        checkpoint: Callable[[], str],
        *,
        stands_by: bool,
    ) -> None:
        self.stands_by = stands_by
        """This group has been in no quorum, and may wait as a spare."""
        self.requests = 0
        """Number of requests so far."""
        self.last_step: StepReport | None = None
        """Report of this rank on its last step."""
        self.root: StateRoot | None = None
        """The root digest of the state, because the lighthouse asked for it."""
        self.leaving = ""
        """Why this group is about to leave the job; empty while it is not."""
        self.leaves_soon = ""
        """Why this group has to leave soon, and asks for a spare; empty: it stays, or leaves at once."""
        self.min_groups = 0
        """Number of groups that form a quorum while the others train on; 0: groups wait for the quorum."""
        self.grace = timedelta(0)
        """How long such a quorum waits for further groups."""
        self._progress = progress
        self._compared = compared
        self._reconfigurer = reconfigurer
        self._checkpoint = checkpoint

    def next(self, timeout: float, *, allow_heal: bool, shrink_only: bool, publish: str = "") -> RankAsk:
        """Build the request for the quorum of the next step; ``timeout`` in seconds.

        ``publish``: as in ``QuorumRequest``; not empty: no step follows.
        """
        self.requests += 1
        progress = self._progress
        return _make_ask(
            request=self.requests,
            step=progress.step,
            lineage=progress.lineage,
            shrink_only=shrink_only,
            commit_failures=max(progress.commit_failures, 1 if self._reconfigurer.broken else 0),
            timeout_ms=max(1, round(timeout * 1000)),
            leaving=self.leaving,
            layout=self._compared.digest,
            checkpoint=self._checkpoint(),
            root=self.root,
            batches_committed=progress.batches_committed,
            allow_heal=allow_heal,
            settings=self._compared.settings,
            last_step=self.last_step,
            min_groups=self.min_groups,
            grace_ms=round(self.grace.total_seconds() * 1000),
            final=publish != "",
            replace=self.leaves_soon,
            publish=publish,
        )

    def after_exchange(self, ask: RankAsk, failed_heals: int, heal_seconds: float) -> RankAsk:
        """Build the request for another quorum of the step of ``ask``, after live state was exchanged.

        Args:
            ask: the request for the quorum in which it was.
            failed_heals: number of heals of this group that failed in this step.
            heal_seconds: time that other groups may still need for their heals.
        """
        progress = self._progress
        self._compared.read()  # the load may have unfrozen parameters
        return replace(
            ask,
            layout=self._compared.digest,
            step=progress.step,
            lineage=progress.lineage,
            batches_committed=progress.batches_committed,
            commit_failures=max(failed_heals, 1 if self._reconfigurer.broken else 0),
            timeout_ms=ask.timeout_ms + round(heal_seconds * 1000),
            root=None,
            leaving=self.leaving,
        )

    def retry(self, timeout: float, *, allow_heal: bool) -> RankAsk:
        """Build the request for a quorum of the step that failed; ``timeout`` in seconds.

        Without new groups, which have no gradients for it. A group that is about to leave takes the step first.
        """
        wanted = self.next(timeout, allow_heal=allow_heal, shrink_only=True)
        return replace(wanted, retry=True, leaving="", commit_failures=max(1, wanted.commit_failures))
