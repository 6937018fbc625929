"""Names of jobs, services and checkpoints, which become parts of paths, and of replica groups.

A replica_id names one incarnation of a replica group: ``<stable name>:<incarnation>``. The incarnation is a UUID
and has no colon; the stable name may have some.
"""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_REPLICA_ID = 256
MAX_GROUP_NAME = MAX_REPLICA_ID - len(":00000000-0000-0000-0000-000000000000")


def problem(name: str, what: str) -> str | None:
    """Why ``name`` is none for a ``what``, as a sentence; None if it is one."""
    if NAME.fullmatch(name) is not None:
        return None
    return f"{name[:80]!r} is no name of a {what}: up to 128 letters, digits, '.', '_' and '-', a letter or digit first"


def name_of(replica_id: str) -> str:
    """Return the stable name: ``r0`` of ``r0:7e0c...``, ``a:0`` of ``a:0:7e0c...``. Without a colon: all of it."""
    return replica_id.rpartition(":")[0] or replica_id


def group_name_problem(name: str) -> str | None:
    """Why ``name`` cannot be the stable name of a replica group, as a sentence; None if it can."""
    if 0 < len(name) <= MAX_GROUP_NAME and name.isprintable():
        return None
    return f"invalid name of a replica group {name[:80]!r}: expected 1 to {MAX_GROUP_NAME} printable characters"
