"""The network between groups and lighthouses: connections, and which pairs of hosts are partitioned."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.simulation.virtual.network import Connection, End, Timeline


class Mesh:
    """Hosts are names of groups and addresses of lighthouses. ``note`` receives a line for the trace."""

    def __init__(self, time: Timeline, random: Random, note: Callable[[str], None]) -> None:
        self._time, self._random, self._note = time, random, note
        self._partitioned: set[frozenset[str]] = set()
        self._connected: list[tuple[str, str, Connection]] = []

    def connect(self, here: str, client: End, there: str, lighthouse: End) -> Connection:
        connection = Connection(client, lighthouse, self._time, self._random)
        self._connected = [one for one in self._connected if not one[2].is_over]
        self._connected.append((here, there, connection))
        return connection

    def between(self, one: str, other: str) -> list[Connection]:
        """The open connections of two hosts."""
        ends = ((one, other), (other, one))
        return [connection for a, b, connection in self._connected if (a, b) in ends]

    def is_partitioned(self, one: str, other: str) -> bool:
        return bool(self._partitioned) and frozenset((one, other)) in self._partitioned

    def refuse(self, one: str, other: str) -> None:
        """Prevent new connections of two hosts until ``rejoin``."""
        self._partitioned.add(frozenset((one, other)))

    def partition(self, one: str, other: str, seconds: float, *, silently: bool = True) -> None:
        """Separate two hosts. ``silently``: their connections deliver nothing; otherwise they break."""
        self._note(f"{one} and {other} are partitioned")
        self.refuse(one, other)
        connections = self.between(one, other)
        for connection in connections:
            if silently:
                connection.partition()
            else:
                connection.cut()
        self._time.after(seconds, self._end_partition, one, other, connections)

    def break_then_partition(self, one: str, other: str, seconds: float) -> None:
        """Break the connections of two hosts, notify both ends, then separate them silently."""
        for connection in self.between(one, other):
            connection.cut()
        self.refuse(one, other)
        self._time.after(0.01, self.partition, one, other, seconds)

    def rejoin(self, one: str, other: str) -> None:
        self._partitioned.discard(frozenset((one, other)))
        for connection in self.between(one, other):
            connection.rejoin()

    def _end_partition(self, one: str, other: str, connections: list[Connection]) -> None:
        for connection in connections:  # connections that have ended hold messages too
            connection.rejoin()
        self.rejoin(one, other)
