"""The training thread of a group: it may hang, or be slow, while its session goes on. Its stacks tell what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from keepstep_mesh.protocol.stack_messages import RankStacks, ThreadStack

if TYPE_CHECKING:
    from tests.simulation.actors.worker import Worker

Trouble = Literal["hangs", "works", "reads", "evaluates"]
"""``hangs``: for ever; else for a while. ``works``: its stack changes; ``reads``: its count of work grows;
``evaluates``: in a section."""
SECTION_MS = 600_000


class TrainingThread:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.trouble: Trouble | None = None
        self.since = self._until = 0.0
        self._answers = 0
        self._stands = False
        """The trouble has begun: before, the thread goes on in the part of the step in which it is."""

    def begins(self, trouble: Trouble, seconds: float) -> None:
        """From the next part of a step on, the thread is in trouble, if it is in none."""
        now = self._worker.sim.time.now
        if self.trouble is None or self._until <= now:
            self.trouble, self._stands = trouble, False
            self._until = float("inf") if trouble == "hangs" else now + seconds

    @property
    def hangs(self) -> bool:
        """Whether the thread hangs, or will at the next part of its step."""
        return self.trouble == "hangs"

    def holds(self, act: Callable[..., None], *args: Any) -> bool:
        """Return whether the thread does not come to ``act`` now. It does when its trouble is over."""
        now = self._worker.sim.time.now
        if self.trouble is None or self._until <= now:
            self.trouble = None
            return False
        if not self._stands:
            self._stands, self.since = True, now
        if not self.hangs:
            self._worker.soon(self._until - now, act, *args)
        return True

    def stacks(self, number: int) -> RankStacks:
        """Answer a request for the stacks."""
        worker, self._answers = self._worker, self._answers + 1
        trouble = self.trouble if self._stands and worker.sim.time.now < self._until else None
        waits = trouble is None and (worker.contributed or worker.waits_for_state)
        place = self._answers if trouble == "works" else f"{trouble} {waits}"
        section = trouble == "evaluates"
        return RankStacks(
            number=number,
            rank=0,
            line="train.py:8 next(batches)" if trouble else "train.py:12 loss.backward()",
            waits="groups" if waits else "",
            section="evaluate" if section else "",
            section_ms=round(1000 * (worker.sim.time.now - self.since)) if section else 0,
            section_limit_ms=SECTION_MS if section else 0,
            step=worker.step,
            collectives=int(worker.contributed),
            in_flight="all-reduce 1" if worker.contributed else "",
            stacks=(ThreadStack("MainThread", (f"train.py:{place} step", "library.py:1 read")),),
            work=self._answers if trouble == "reads" else 0,
            commits=worker.commits,
        )
