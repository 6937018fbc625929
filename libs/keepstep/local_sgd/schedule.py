"""When an outer step begins and ends, and which fragment it synchronizes. Pure.

A period is the inner steps from the end of one outer step to the end of the next::

    inner steps   1 ... period - delay ... period
                             |                |
                          begins            ends

The number of committed outer steps selects the fragment. It is the same in all groups and does not change when an outer
step fails, so that all groups try the same fragment again.
"""

from __future__ import annotations


class Schedule:
    """The position of one group in its period.

    Args:
        sync_every: inner steps in which every fragment is synchronized once.
        fragments: number of fragments.
        delay: inner steps between the begin and the end of an outer step.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(self, sync_every: int, fragments: int = 1, delay: int = 0) -> None:
        if fragments < 1:
            raise ValueError("model_fragments is empty; pass at least one module")
        if sync_every < 1 or sync_every % fragments:
            what = f"a multiple of the {fragments} fragments" if fragments > 1 else "at least 1"
            raise ValueError(f"sync_every={sync_every} must be {what}: each fragment has a period of its own")
        self.period = sync_every // fragments
        if not 0 <= delay < self.period:
            raise ValueError(
                f"fragment_sync_delay={delay} must be in [0, {self.period}): one outer step ends every {self.period} "
                f"inner steps, and before the next one begins"
            )
        self.fragments = fragments
        self.delay = delay
        self.position = 0
        """Inner steps since the last outer step ended."""
        self.in_flight: int | None = None
        """The fragment whose outer step has begun."""

    def count(self) -> None:
        """Count an inner step."""
        self.position += 1

    @property
    def begins(self) -> bool:
        """Whether an outer step begins now."""
        return self.in_flight is None and self.position >= self.period - self.delay

    @property
    def ends(self) -> bool:
        """Whether the outer step that has begun ends now."""
        return self.in_flight is not None and self.position >= self.period

    def begin(self, committed: int) -> int:
        """Begin an outer step and return its fragment. ``committed``: number of committed outer steps."""
        self.in_flight = committed % self.fragments
        return self.in_flight

    def end(self) -> None:
        """End the outer step, committed or not; the next period begins."""
        self.position, self.in_flight = 0, None

    def abandon(self) -> None:
        """Forget the outer step that has begun; another one begins after the next inner step."""
        self.in_flight = None

    def skip_to_begin(self) -> None:
        """Leave out the inner steps that are left before the next outer step begins."""
        self.position = max(self.position, self.period - self.delay)
