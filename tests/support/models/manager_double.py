"""A Manager without other groups, for unit tests; tests/services/manager has real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

from keepstep.group.agreement import LayoutPart
from keepstep.script_checks.script_checker import ScriptChecker
from keepstep.step.live_state import LiveState
from keepstep_mesh.config.logging import get_logger


class ManagerDouble:
    """The common part of all doubles of a Manager: its default settings, its layout, and its script checker.

    A double adds the steps and collectives that its tests need. It is its own ``steps`` and ``background``.

    Args:
        rank: of this group among those that take part.
    """

    use_async_quorum, init_sync = True, True
    refuse_nonfinite, retry_allreduce, rehearsing, catching_up = False, False, False, False

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.layout: list[str] = []
        self.script_checker = ScriptChecker(LiveState(dict, lambda _: None), get_logger("keepstep.tests"), 0, 1)

    @property
    def steps(self) -> Self:
        return self

    background = joining = steps

    def follow_if_possible(self, *_: object) -> None:
        """Return that the group heals."""

    def should_commit(self) -> bool:
        """Return whether the step commits."""
        raise NotImplementedError

    @contextlib.contextmanager
    def committing(self) -> Iterator[bool]:
        yield self.should_commit()

    def num_participants(self) -> int:
        """Return the number of groups that take part."""
        raise NotImplementedError

    def participation(self) -> tuple[int | None, int]:
        return self.participating_rank(), self.num_participants()

    def participating_rank(self) -> int | None:
        return self.rank

    def add_layout(self, lines: list[str] | LayoutPart) -> None:
        self.layout += lines if isinstance(lines, list) else lines.lines()
