"""How a command ends when it cannot do its work: one class for each exit code. docs/cli.md has the same table.

0 is success, 1 an answer that is no (a group was given up, the demo's weights differ), 2 a flag that makes no sense
(``click.UsageError``).
"""

from __future__ import annotations

from click import ClickException


class Unreachable(ClickException):
    """No lighthouse answers."""

    exit_code = 3


class Refused(ClickException):
    """The lighthouse says no: token missing or wrong, unknown job or replica."""

    exit_code = 4


class Missing(ClickException):
    """Something is not installed."""

    exit_code = 5
