"""What jobs, services and checkpoints may be called. Names become parts of paths: this keeps them from leading away."""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def problem(name: str, what: str) -> str | None:
    """Why ``name`` is none for a ``what``, as a sentence; None if it is one."""
    if NAME.fullmatch(name) is not None:
        return None
    return f"{name[:80]!r} is no name of a {what}: up to 128 letters, digits, '.', '_' and '-', a letter or digit first"
