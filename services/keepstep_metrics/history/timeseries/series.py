"""Sums over time at three resolutions: 1 s, 15 s and 2 min. Pure.

A row is a bucket of time. A late value is added to the row of its own time.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LEVELS = ((1, 900), (15, 960), (120, 720))
"""(Seconds per row, number of rows): 15 minutes, 4 hours, 1 day."""


class Ring:
    """A table of sums with one row for each period in which a value arrived. A new row replaces the oldest.

    Args:
        width: length of a period, in seconds.
        limit: number of rows.
        columns: number of sums in a row.
        code: type of a sum, as in ``array.array``.
    """

    def __init__(self, width: int, limit: int, columns: int, code: str) -> None:
        self.width = width
        self._limit = limit
        self._columns = columns
        self.times = array("I")
        """Unix seconds divided by ``width``."""
        self._cells: array[Any] = array(code)
        self._empty = array(code, [0] * columns)

    def at(self, t: float) -> int | None:
        """Return the index of the first cell of the row of ``t``; None: the row was forgotten."""
        number = int(t // self.width)
        times = self.times
        if number < 0:
            return None
        if times and times[-1] == number:
            return (len(times) - 1) * self._columns
        if not times or number > times[-1]:
            times.append(number)
            self._cells.extend(self._empty)
            if len(times) > self._limit + self._limit // 8 + 1:
                del self._cells[: (len(times) - self._limit) * self._columns], times[: -self._limit]
            return (len(times) - 1) * self._columns
        if number < times[-1] - self._limit:
            return None
        row = bisect_left(times, number)
        if times[row] != number:
            times.insert(row, number)
            self._cells[row * self._columns : row * self._columns] = self._empty
        return row * self._columns

    def add(self, t: float, values: Iterable[float]) -> None:
        if (at := self.at(t)) is not None:
            cells = self._cells
            for offset, value in enumerate(values, at):
                cells[offset] += value

    def count(self, t: float, column: int) -> None:
        if (at := self.at(t)) is not None:
            self._cells[at + column] += 1

    def highest(self, t: float, value: float) -> None:
        """Raise column 0 to ``value``."""
        if (at := self.at(t)) is not None and value > self._cells[at]:
            self._cells[at] = value

    def rows(self, since: float, until: float) -> Iterator[tuple[float, Any]]:
        """Iterate over (Unix time of the row's begin, its cells)."""
        columns, width = self._columns, self.width
        first, last = bisect_left(self.times, int(max(since, 0) // width)), bisect_left(self.times, until / width)
        cells = self._cells[first * columns : last * columns]
        rows = zip(*(cells[column::columns] for column in range(columns)), strict=True)  # a chart reads 10^5 rows
        return ((number * width, row) for number, row in zip(self.times[first:last], rows, strict=True))

    def forget_after(self, t: float) -> None:
        first = bisect_right(self.times, max(t, 0) // self.width)
        del self.times[first:], self._cells[first * self._columns :]

    def dump(self) -> tuple[bytes, bytes]:
        return self.times.tobytes(), self._cells.tobytes()

    def load(self, dumped: Any) -> None:
        self.times.frombytes(dumped[0])
        self._cells.frombytes(dumped[1])


class Series:
    """Sums at each of ``LEVELS``."""

    def __init__(self, columns: int, code: str = "f") -> None:
        self.rings = tuple(Ring(width, limit, columns, code) for width, limit in LEVELS)

    def add(self, t: float, values: tuple[float, ...]) -> None:
        for ring in self.rings:
            ring.add(t, values)

    def count(self, t: float, column: int) -> None:
        for ring in self.rings:
            ring.count(t, column)

    def highest(self, t: float, value: float) -> None:
        for ring in self.rings:
            ring.highest(t, value)

    def forget_after(self, t: float) -> None:
        for ring in self.rings:
            ring.forget_after(t)

    def points(
        self,
        since: float,
        until: float,
        width: float,
        now: float,
        together: Callable[[Any, Any], Any] = operator.add,
    ) -> dict[int, Any]:
        """Return cells by the number of the point: ``width`` seconds each, from ``since``, combined by ``together``."""
        found: dict[int, Any] = {}
        for t, cells in self.ring(since, width, now).rows(since, until):
            point = max(0, int((t - since) // width))
            known = found.get(point)
            found[point] = cells if known is None else (*map(together, known, cells),)
        return found

    def ring(self, since: float, width: float, now: float) -> Ring:
        """Return the coarsest ring within ``width``, or the finest one, that reaches back to ``since``."""
        reach = [ring for ring, (step, limit) in zip(self.rings, LEVELS, strict=True) if now - since <= step * limit]
        reach = reach or [self.rings[-1]]
        fine = [ring for ring in reach if ring.width <= width]
        return fine[-1] if fine else reach[0]

    def dump(self) -> list[tuple[bytes, bytes]]:
        return [ring.dump() for ring in self.rings]

    def load(self, dumped: Any) -> None:
        for ring, one in zip(self.rings, dumped, strict=True):
            ring.load(one)
