"""Tell an error that a script makes in every step from one that passes. Pure.

A step that fails because a group was lost commits in its next attempt. An error of the script itself, such as a tensor
that cannot be reduced, comes again in every attempt, and the group would discard steps for ever. So the same error of
this group in ``LIMIT`` steps in a row ends the group, whose launcher and user then see its traceback.
"""

from __future__ import annotations

LIMIT = 3
"""Steps in a row."""


class RepeatedError:
    """Counts the steps in a row that failed with one error of this group."""

    def __init__(self) -> None:
        self._error: tuple[type[Exception], str] | None = None
        self._count = 0

    def step_ended(self, own: Exception | None) -> bool:
        """Count a step, and return whether its error ends the group.

        Args:
            own: the error of this group for which the step did not commit; None: the step committed, or failed for
                another reason.
        """
        error = None if own is None else (type(own), str(own))
        self._count = self._count + 1 if error == self._error else 1
        self._error = error
        return error is not None and self._count >= LIMIT
