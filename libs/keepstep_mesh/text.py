"""Text of messages for people."""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[str], limit: int, separator: str = ", ") -> str:
    """Return ``a, b and 3 more``: the first ``limit`` names and the number of the others."""
    all_names = list(names)
    more = f" and {len(all_names) - limit} more" if len(all_names) > limit else ""
    return separator.join(all_names[:limit]) + more


def printable(text: str, keep: str = "") -> str:
    """Return ``text`` with escapes of Python instead of the characters that a terminal obeys or hides.

    Args:
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text])


def bytes_text(value: float) -> str:
    """Return ``512 B``, ``1.5 KiB``, ``20.0 MiB`` or ``3.2 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
