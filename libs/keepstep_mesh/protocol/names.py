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
    """Return why ``name`` is invalid for a ``what``; None if it is valid."""
    if NAME.fullmatch(name) is not None:
        return None
    return f"invalid {what} name {name[:80]!r}: expected 1-128 characters of [A-Za-z0-9._-], a letter or digit first"


def name_of(replica_id: str) -> str:
    """Return the stable name: ``r0`` of ``r0:7e0c...``, ``a:0`` of ``a:0:7e0c...``. Without a colon: all of it."""
    return replica_id.rpartition(":")[0] or replica_id


def group_name_problem(name: str) -> str | None:
    """Return why ``name`` is invalid as the stable name of a replica group; None if it is valid."""
    if 0 < len(name) <= MAX_GROUP_NAME and name.isprintable():
        return None
    return f"invalid name of a replica group {name[:80]!r}: expected 1 to {MAX_GROUP_NAME} printable characters"
