"""Numbers as people read them: times, rates, and the numbers of events. Pure."""

from __future__ import annotations

import click

from keepstep_mesh.text import seconds_text

EVENT_BITS = 32
"""The number of an event is the epoch times ``2**EVENT_BITS``, plus a count."""


def ago_text(value: float | None) -> str:
    return "-" if value is None else f"{seconds_text(value)} ago"


def rate_text(per_second: float | None) -> str:
    """Return a rate with two or three digits; ``-`` for None."""
    if per_second is None:
        return "-"
    return f"{per_second:.0f}" if per_second >= 10 else f"{per_second:.2g}"


def event_text(number: int) -> str:
    """Return ``2.17``: the epoch, and the count of the event in it."""
    return f"{number >> EVENT_BITS}.{number & ((1 << EVENT_BITS) - 1)}"


class EventNumber(click.ParamType[int]):
    """``2.17`` or the whole number, as the number of an event."""

    name = "event"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        epoch, dot, count = str(value).partition(".")
        if not epoch.isdecimal() or len(epoch) > 20 or (dot and not (count.isdecimal() and len(count) <= 10)):
            self.fail(f"{value!r}: expected the number of an event, such as 2.17", param, ctx)
        return (int(epoch) << EVENT_BITS) + int(count) if dot else int(epoch)
