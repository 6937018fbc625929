"""Orders for a running ``keepstep run`` from the same user on the same machine, over an abstract Unix socket.

The name of the socket has the user, the job, and the process: ``/proc/net/unix`` lists all of them. Processes in
containers that share a network may have the same id, so the name has the pid namespace too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ORDER_SECONDS = 5.0
MAX_ORDER_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 1 << 20
LONGEST_JOB = 60
"""Characters of a job's name; a longer one is replaced by a digest. The name of a socket has at most 107."""
LISTED, PID_NAMESPACE = Path("/proc/net/unix"), Path("/proc/self/ns/pid")


def _names(job: str) -> str:
    """Return the beginning of the name of each run of a job."""
    known = job if len(job) <= LONGEST_JOB else hashlib.sha256(job.encode()).hexdigest()[:LONGEST_JOB]
    return f"keepstep run {os.getuid()} {known} "


def _own_name(job: str) -> str:
    namespace = PID_NAMESPACE.stat().st_ino if PID_NAMESPACE.exists() else 0
    return f"{_names(job)}{namespace} {os.getpid()}"


def running_here(job: str, pid: int | None = None) -> list[str]:
    """Return the sockets of the runs of ``job`` by this user on this machine: of all, or of the process ``pid``."""
    prefix = "@" + _names(job)
    lines = LISTED.read_text().splitlines() if LISTED.exists() else []
    found = sorted({line[line.index(prefix) + 1 :] for line in lines if prefix in line})
    return [one for one in found if pid is None or one.endswith(f" {pid}")]


@asynccontextmanager
async def accepting_orders(
    job: str,
    groups: Sequence[str],
    restart: Callable[[str], None],
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> AsyncIterator[None]:
    """Accept orders while the context is open. ``restart`` is called with each group of ``groups`` to restart.

    ``facts``: more of the answer: ``processes`` (process ids by local name) and ``names`` (names at the lighthouse).
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                if _same_user(writer.get_extra_info("socket")):
                    writer.write(_answered(await reader.readline(), groups, restart, facts))
                    await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # the client reports that it got no answer
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, f"\0{_own_name(job)}", limit=MAX_ORDER_BYTES)
    try:
        yield
    finally:
        server.close()


def _same_user(connection: Any) -> bool:
    """Whether the peer is this user or root: an abstract socket has no file permissions."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", raw)[1]
    return uid in (0, os.getuid())


def _answered(
    line: bytes, groups: Sequence[str], restart: Callable[[str], None], facts: Callable[[], Mapping[str, Any]]
) -> bytes:
    wanted = [name for name in json.loads(line)["restart"] if name in groups]
    for name in wanted:
        restart(name)
    return json.dumps({**facts(), "restarted": wanted, "groups": list(groups)}).encode() + b"\n"


def order_restart(address: str, groups: Sequence[str]) -> dict[str, Any]:
    """Send the order to one run; return the groups that it restarts, all of its groups, and its processes.

    Raises OSError.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ORDER_SECONDS)
        connection.connect(f"\0{address}")
        connection.sendall(json.dumps({"restart": list(groups)}).encode() + b"\n")
        with connection.makefile("rb") as answer:
            line = answer.readline(MAX_ANSWER_BYTES)
    if not line:
        raise ConnectionResetError(f"{address} did not answer")
    found: dict[str, Any] = json.loads(line)
    return found
