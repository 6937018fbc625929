"""Keep the first error of a step, which keeps the step from committing, and whose error it is.

Two things depend on it. After an error of its own a group does not retry the step (``retry_allreduce``). The lighthouse
keeps a group out that fails by itself again and again, so ``failure_evidence`` gets the cause of each failed step.
"""

from __future__ import annotations

import sys

from keepstep.process_group.group_errors import UnsupportedCollectiveError
from keepstep.runtime.exits import must_succeed
from keepstep.step.context import StepContext
from keepstep.step.evidence.repeated_error import OwnError
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.membership import OWN, UNKNOWN


class FirstError:
    """The first error of the present try of a step. Errors are reported from any thread."""

    def __init__(self, context: StepContext) -> None:
        self.error: Exception | None = None
        self.own = False
        """Whether an error was reported that did not come from the other groups."""
        self._context = context
        self.of_this_group: OwnError | None = None
        """The error, if this group caused it."""
        self._cause = ""
        """Of ``error``, as in ``StepFailure``; empty: every group fails for this reason."""
        self._abort = ""
        """Why the process group was aborted."""
        self.ended = False
        """Whether the step has ended: errors that are reported from then on have no effect."""

    def report(self, error: Exception, *, cause: str = OWN) -> None:
        """Report an error of this group: the step does not commit, and the process group is aborted.

        Args:
            error: the reason.
            cause: ``OWN``, or ``UNKNOWN`` if other groups may have caused it.
        """
        self.own = True
        self._note(error, cause)

    def report_of_peers(self, error: Exception) -> None:
        """Report the error of a collective, which came from the other groups or from the connections to them.

        If this group caused it, it has no place in the script, which only waits for it.
        """
        if isinstance(error, UnsupportedCollectiveError):
            self.own = True
            self._note(error, OWN, has_place=False)
        else:
            self._note(error, UNKNOWN)

    @must_succeed("the report of an error")
    def _note(self, error: Exception, cause: str, *, has_place: bool = True) -> None:
        context = self._context
        if not self.ended and self.error is None:
            self.error, self._cause = error, cause
            placed = OwnError.reported(error, sys._getframe(1)) if has_place else OwnError(error, ())  # noqa: SLF001
            self.of_this_group = placed if cause == OWN else None
            reason = f"{type(error).__name__}: {error}"
            context.log.warning("step will not commit", step=context.progress.step, reason=reason)
            self._abort = f"this group reported {reason}"
            self.abort()

    def abort(self) -> None:
        """Abort the process group, if an error was reported: again, because one that is being built stays."""
        if self._abort:
            self._context.reconfigurer.abort(self._abort)

    def vote_no(self, error: Exception) -> None:
        """Keep this step from committing. The process group stays, because every group votes no for this reason."""
        self.error, self.own, self._cause, self.of_this_group = error, True, "", None
        self._context.log.warning("step will not commit", step=self._context.progress.step, reason=str(error))

    def outvoted(self, reason: str = "another rank of this group voted no") -> None:
        """Note that the step does not commit because of another rank of this group."""
        self.error, self._cause = KeepstepError(reason), ""
        self.of_this_group = None

    def forget(self) -> None:
        """Forget the error, because the step goes on with another quorum."""
        self._leave_evidence()
        self.error, self._cause, self._abort, self.of_this_group = None, "", "", None

    def retry(self) -> None:
        """Forget the error, because the step is tried again."""
        self.forget()
        self.own = False

    def end(self) -> None:
        """End the step."""
        self.ended = True
        self._leave_evidence()
        self._context.evidence.ended()

    def _leave_evidence(self) -> None:
        if self.error is not None and self._cause:
            self._context.evidence.failed(self._cause, self.error)
