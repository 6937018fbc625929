"""Keep the first error of a step, which keeps the step from committing, and whether this group caused one itself."""

from __future__ import annotations

from keepstep.step.context import StepContext


class FirstError:
    """The first error of the present try of a step. Errors are reported from any thread."""

    def __init__(self, context: StepContext) -> None:
        self.error: Exception | None = None
        self.own = False
        """Whether an error was reported that did not come from the other groups."""
        self._context = context
        self._ended = False

    def report(self, error: Exception) -> None:
        """Report an error of this group: the step does not commit, and the process group is aborted."""
        self.own = True
        self.report_of_peers(error)

    def report_of_peers(self, error: Exception) -> None:
        """Report an error that came from the other groups, or from the connections to them."""
        context = self._context
        if not self._ended and self.error is None:
            self.error = error
            reason = f"{type(error).__name__}: {error}"
            context.log.warning("step will not commit", step=context.progress.step, reason=reason)
            context.reconfigurer.abort(f"this group reported {reason}")

    def vote_no(self, error: Exception) -> None:
        """Keep this step from committing. The process group stays, because every group votes no for this reason."""
        self.error, self.own = error, True
        self._context.log.warning("step will not commit", step=self._context.progress.step, reason=str(error))

    def clear(self) -> None:
        """Forget the error, because the step goes on with another quorum."""
        self.error = None

    def retry(self) -> None:
        """Forget the error, because the step is tried again."""
        self.error, self.own = None, False

    def end(self) -> None:
        """End the step: errors that are reported from now on have no effect."""
        self._ended = True
