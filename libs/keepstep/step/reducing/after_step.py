"""Collectives between the end of a step and the beginning of the next one, such as the average of a loss for the log.

The groups that took part in the step take part in them. They change nothing of what the step decided: an error is
logged, and the process group is rebuilt with the next quorum.
"""

from __future__ import annotations

import time

from keepstep.group.quorum_plan import Participation
from keepstep.step.context import StepContext
from keepstep.step.reducing.collectives import Collectives
from keepstep.step.reduction import ManagedWork, Reduction
from keepstep.step.reporting.step_telemetry import StepTimes


class AfterStep:
    """The time after one step.

    Args:
        context: of this process.
        participation: of this group in the step. Without any group that took part, no collective does anything.
        error: why the step was discarded; None: it was committed.
    """

    def __init__(self, context: StepContext, participation: Participation, error: Exception | None = None) -> None:
        self.error = error
        """Of the step, else of the first collective that failed; all later ones do nothing."""
        self._context = context
        self._participation = participation
        self._collectives: Collectives | None = None
        """None: none was started."""

    def allreduce(self, reduction: Reduction) -> ManagedWork:
        """Reduce a tensor in place. See ``Collectives.allreduce``."""
        if self._collectives is None:
            part = self._participation if self._participation[1] else None
            self._collectives = Collectives(self._context, StepTimes(time.monotonic()), self, lambda: part)
        return self._collectives.allreduce(reduction)

    def end(self) -> None:
        """Wait for the collectives, before the next step begins.

        After a discarded step, end the process group, which the next quorum rebuilds anyway: another group may have
        committed the step, and wait for this one in such a collective.
        """
        if self._collectives is not None:
            self._collectives.finish()
        if self.error is not None:
            self._context.reconfigurer.abort("this group discarded the step")
        elif self._collectives is not None:
            self._collectives.check_process_group()

    def report_of_peers(self, error: Exception) -> None:
        """See ``Errors``."""
        self.report(error)

    def report(self, error: Exception) -> None:
        """See ``Errors``."""
        if self.error is None:
            self.error = error
            reason = f"{type(error).__name__}: {error}"
            self._context.log.warning(
                "collective after the step failed", step=self._context.progress.step, reason=reason
            )
            self._context.reconfigurer.abort(f"this group reported {reason}")
