"""Order a fault inside a process that was started with ``KEEPSTEP_CHAOS``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep_chaos.fault_orders import LONGEST_FAULT_SECONDS, SOCKET_NAME
from keepstep_chaos.observing.process_table import GONE, PROC
from keepstep_mesh.faults import CHAOS_ENV

ORDERED_FAULT_SECONDS = 45.0
"""Longest wait for an answer, after the time of the fault: an order waits for a step."""


class OrderError(Exception):
    """A process did not carry out an order."""


def why_not(pids: Sequence[int]) -> str | None:
    """Return why no fault can be ordered inside these processes; None: it can."""
    return None if any(any(_sockets(pid)) for pid in pids) else f"it was started without {CHAOS_ENV}=FOLDER"


def _sockets(pid: int) -> Iterator[str]:
    """Yield the paths of the sockets at which a process accepts orders."""
    with contextlib.suppress(*GONE):
        for line in (PROC / str(pid) / "net" / "unix").read_text().splitlines():
            path = Path(line.split(maxsplit=7)[-1])
            if (found := SOCKET_NAME.fullmatch(path.name)) is not None and int(found[1]) == pid:
                yield str(path)


async def order(pids: Sequence[int], kind: str, seconds: float) -> None:
    """Let the first of these processes that accepts orders bring a fault on itself, and return when it is over.

    The process undoes the fault if this is cancelled. A process that ends instead of an answer has been hit.

    Raises:
        OrderError: no process accepts orders, or the fault did not hit.
        OSError, TimeoutError: the process does not answer.
    """
    path = next((path for pid in pids for path in _sockets(pid)), None)
    if path is None:
        raise OrderError(str(why_not(pids)))
    seconds = min(seconds, LONGEST_FAULT_SECONDS)
    async with asyncio.timeout(5.0):
        reader, writer = await asyncio.open_unix_connection(path)
    try:
        async with asyncio.timeout(seconds + ORDERED_FAULT_SECONDS):
            writer.write(json.dumps({"kind": kind, "seconds": seconds}).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
    except ConnectionError:
        line = b""
    finally:
        writer.close()
    if line and (error := json.loads(line)["error"]):
        raise OrderError(error)
