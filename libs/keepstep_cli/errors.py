"""Errors that end a command, one class for each exit code. docs/cli.md has the same table.

0 is success, 1 a negative answer (a group was given up, the demo's weights differ), 2 an invalid flag
(``click.UsageError``).
"""

from __future__ import annotations

from http import HTTPStatus

from click import ClickException


class Unreachable(ClickException):
    """No lighthouse answers. ``may_pass``: no process listens at all, so a lighthouse may still start."""

    exit_code = 3

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class Refused(ClickException):
    """The lighthouse refuses: token missing or wrong, unknown job or replica.

    ``status``: the HTTP status. ``may_pass``: it cannot answer now, but may later.
    """

    exit_code = 4

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.may_pass = status >= HTTPStatus.INTERNAL_SERVER_ERROR


class Missing(ClickException):
    """A package is not installed."""

    exit_code = 5


class Unwritable(ClickException):
    """The output could not be written. The action of the command was done."""

    exit_code = 6


class Wedged(ClickException):
    """``keepstep chaos``: no step committed although enough groups were able to."""

    exit_code = 7
