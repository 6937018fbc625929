"""Text of messages for people."""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[str], limit: int) -> str:
    """Return ``a, b and 3 more``: the first ``limit`` names and the number of the others."""
    all_names = list(names)
    more = f" and {len(all_names) - limit} more" if len(all_names) > limit else ""
    return ", ".join(all_names[:limit]) + more
