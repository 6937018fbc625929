"""Tell an error that a script makes in every step from one that passes.

A step that fails because a group was lost commits in its next attempt. An error of the script itself, such as a tensor
that cannot be reduced, comes again in every attempt, and the group would discard steps for ever. So the same error of
this group in ``LIMIT`` steps in a row ends the group, whose launcher and user then see its traceback.

Errors are the same if they have one type and come from one place of the script. Their text may have a loss, an address
or the number of a step, and differ each time. An error that another thread reports, or that of a collective, has no
place in the script: then the text counts.
"""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

LIMIT = 3
"""Steps in a row."""

_LIBRARIES = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))
"""Folders of code that no user wrote for this training; installed packages are in the last one."""


@dataclass(frozen=True, slots=True)
class OwnError:
    """An error of this group."""

    error: Exception
    place: tuple[tuple[str, int, str], ...]
    """File, line and function of the innermost frame of the script, and where it was raised or reported below that.
    Empty: no frame of the script is known."""

    @classmethod
    def reported(cls, error: Exception, frame: FrameType) -> OwnError:
        """Return the error with its place. ``frame``: of the code that reports it."""
        frames = [(one.f_code.co_filename, line, one.f_code.co_name) for one, line in traceback.walk_stack(frame)]
        frames.reverse()
        raised = traceback.walk_tb(error.__traceback__)
        frames += [(one.f_code.co_filename, line, one.f_code.co_name) for one, line in raised]
        of_script = [one for one in frames if not one[0].startswith(("<", *_LIBRARIES))]
        return cls(error, (of_script[-1], frames[-1]) if of_script else ())

    def is_same(self, other: OwnError) -> bool:
        """Return whether both have one cause, as far as that is known."""
        if type(self.error) is not type(other.error):
            return False
        return self.place == other.place if self.place and other.place else str(self.error) == str(other.error)


class RepeatedError:
    """Counts the steps in a row that failed with one error of this group."""

    def __init__(self) -> None:
        self._last: OwnError | None = None
        self._count = 0

    def step_ended(self, own: OwnError | None) -> bool:
        """Count a step, and return whether its error ends the group.

        Args:
            own: the error of this group for which the step did not commit; None: the step committed, or failed for
                another reason.
        """
        last, self._last = self._last, own
        if own is None:
            return False
        self._count = self._count + 1 if last is not None and own.is_same(last) else 1
        return self._count >= LIMIT
