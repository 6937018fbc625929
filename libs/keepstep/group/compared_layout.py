"""Settings and parameters of this rank, as the groups of the job compare them."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.group.agreement import Layout, LayoutChanges, LayoutPart, PartsMissing, layout_digest
from keepstep.group.group_peers import first_layout_difference, first_values_difference
from keepstep.group.ranks.rank_link import RankLink
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep_mesh.protocol.membership import with_settings
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.text import listed

MAX_INCOMPLETE = 3
"""Number of steps in a row that a script takes alone until it has added what the job has."""


class ComparedLayout:
    """Settings and parameters that this rank must have in common with the other groups.

    Args:
        loop_thread: asks other groups.
        link: of this rank. Other groups read the layout there.
        token: for requests to other groups.
        settings: those that decide this group's arithmetic.
        rank: of this process in its group. It is compared with the same rank of another group.
    """

    def __init__(
        self, loop_thread: LoopThread, link: RankLink, token: str | ClientToken | None, settings: str, rank: int
    ) -> None:
        self.settings = settings
        """Those that decide this group's arithmetic; those of all groups must be equal."""
        self.layout = Layout()
        """The parameters and buckets of this rank."""
        self.digest = ""
        """Of settings and layout; empty without a layout."""
        self._loop_thread = loop_thread
        self._link = link
        self._token = token
        self._rank = rank
        self._lines: list[str] = []
        """Those of the layout, when it was read last."""
        self._trains = False
        """Whether the layout was read for a step."""
        self._of_job: list[str] | None = None
        """The lines of another group, because the lighthouse refused those of this one; None: it did not."""
        self._incomplete = 0
        """Number of requests in a row that were refused because the job has parts that this group does not have."""

    def add(self, part: LayoutPart) -> None:
        """Add to the layout."""
        self.layout.add(part)
        self._read()

    def read(self) -> None:
        """Read the layout for a step; it may have changed since the last one. Adopt that of the job, if it is known."""
        self._read()
        self._trains = True

    def _read(self) -> None:
        if self._of_job is not None:
            lines, self._of_job = self._of_job, None
            self.layout.adopt(lines)
        if (lines := self.layout.lines()) != self._lines:
            self._lines, self._incomplete = lines, 0
            self.digest = layout_digest(self.settings, lines)
            self._link.layout_lines = lines
            self._link.layout_changed |= self._trains

    def add_settings(self, settings: Mapping[str, str]) -> None:
        """Add settings, in the place of those of the same name."""
        self.settings = with_settings(self.settings, settings)
        self.digest = layout_digest(self.settings, self._lines)

    def difference_from(self, address: str) -> tuple[list[str], str, bool]:
        """Return what ``first_layout_difference`` does, of the group served at ``address``. On the training thread."""
        values = self._link.step_values.lines()
        asking = first_layout_difference(
            address, self._token, self._lines, settings=self.settings, values=values, rank=self._rank
        )
        return self._loop_thread.call(asking, CALL_MARGIN_SECONDS)

    def values_difference_from(self, address: str) -> str:
        """Describe in which values the optimizers of the last steps differ; empty: none is known. As above."""
        asking = first_values_difference(address, self._token, self._link.step_values.lines(), rank=self._rank)
        return self._loop_thread.call(asking, CALL_MARGIN_SECONDS)

    def changes_to(
        self, lines: list[str], peer_step: int, refused: str, *, behind: bool, changed: bool
    ) -> LayoutChanges | None:
        """Return how this group comes to the layout of the job; None: it does not.

        Args:
            lines: of another group, which takes ``peer_step``.
            peer_step: of that group.
            refused: why the lighthouse refused those of this one.
            behind: whether the state of this group is older, or torn. Only then the group is torn for it.
            changed: whether ``lines`` are others than at the first step of that group.
        """
        missing = self.layout.missing(lines)
        if self.layout.could_be(lines):
            self._of_job = lines
            return LayoutChanges(f"{refused}; this group adopts the layout of the job")
        changes = changed and bool(lines) and lines != self._lines
        if not (missing or changes) or not behind or self._incomplete >= MAX_INCOMPLETE:
            return None
        self._incomplete += 1
        self._of_job = lines
        if not missing:
            return PartsMissing(
                f"{refused}; the groups of the job have changed their parameters since they began, and are at step "
                f"{peer_step}; the script takes this step alone, and may change its own before the next one"
            )
        return PartsMissing(
            f"the job is at step {peer_step} and has {len(missing)} entries that this group does not have yet "
            f"({listed(missing, 3)}); the script takes this step alone, and may add them before the next one"
        )
