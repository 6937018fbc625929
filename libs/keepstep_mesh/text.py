"""Text of messages for people."""

from __future__ import annotations

from collections.abc import Iterable

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


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


def seconds_text(value: float | None) -> str:
    """Return ``13 ms``, ``1.5 s``, ``3 min 20 s``, ``2 h 5 min`` or ``7 d``; ``-`` for None."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f}".removesuffix(".0") + " s"
    unit, small = ("min", "s") if value < 7200 else ("h", "min") if value < 172_800 else ("d", "h")
    whole, rest = divmod(round(value / _UNITS[small]), _UNITS[unit] // _UNITS[small])
    return f"{whole} {unit} {rest} {small}" if rest else f"{whole} {unit}"
