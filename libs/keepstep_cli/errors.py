"""How a command ends when it cannot do its work: one class for each exit code. docs/cli.md has the same table.

0 is success, 1 an answer that is no (a group was given up, the demo's weights differ), 2 a flag that makes no sense
(``click.UsageError``).
"""

from __future__ import annotations

from http import HTTPStatus

from click import ClickException


class Unreachable(ClickException):
    """No lighthouse answers. ``may_pass``: nobody is there at all, so that one may yet come."""

    exit_code = 3

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class Refused(ClickException):
    """The lighthouse says no: token missing or wrong, unknown job or replica.

    ``status``: HTTP's. ``may_pass``: it cannot answer now, and may later.
    """

    exit_code = 4

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.may_pass = status >= HTTPStatus.INTERNAL_SERVER_ERROR


class Missing(ClickException):
    """Something is not installed."""

    exit_code = 5


class Unwritable(ClickException):
    """What was to be printed could not be. What the command did is done."""

    exit_code = 6
