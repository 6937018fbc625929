"""A relay that kills itself with SIGKILL at a point of an upload: dying_relay.py FOLDER FLAG...

FLAGs are those of ``keepstep relay``. The relay dies at a point of ``POINTS`` if FOLDER has a file of its name, which
it deletes before.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from keepstep_cli.main import main
from keepstep_relay.tiers.disk_tier import DiskTier
from keepstep_relay.tiers.durable_tier import DurableTier

POINTS = {
    "before the first record": (DiskTier, "begin"),
    "before a chunk": (DiskTier, "write"),
    "before a manifest": (DiskTier, "put_manifest"),
    "before the chunks are synced": (DiskTier, "sync"),
    "before the record of the commit": (DiskTier, "commit"),
    "before an object of a chunk": (DurableTier, "write_chunk"),
    "before the objects of the manifests": (DurableTier, "commit"),
}
"""Methods that are not called any more."""
RECORD_WRITTEN = "before the record of the commit gets its name"
COMMITTED = "after the record of the commit"
OBJECT_OF_RECORD = "before the object of the record"


def die_at(folder: Path, point: str) -> None:
    if (folder / point).exists():
        (folder / point).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def install(folder: Path) -> None:
    def before(kind: type, name: str, point: str) -> None:
        usual: Callable[..., Any] = getattr(kind, name)

        @wraps(usual)
        def dies(*arguments: Any, **how: Any) -> Any:
            die_at(folder, point)
            return usual(*arguments, **how)

        setattr(kind, name, dies)

    for point, (kind, name) in POINTS.items():
        before(kind, name, point)
    place, commit, write = DiskTier._place, DiskTier.commit, DurableTier._write

    def dying_place(self: DiskTier, data: bytes | memoryview, path: Path, *, sync: bool) -> None:
        if sync:  # that of a commit
            place(self, data, self._partial / "record", sync=sync)
            die_at(folder, RECORD_WRITTEN)
        place(self, data, path, sync=sync)

    def dying_commit(self: DiskTier, *arguments: Any) -> None:
        commit(self, *arguments)
        die_at(folder, COMMITTED)

    def dying_write(self: DurableTier, path: str, data: memoryview) -> None:
        if path.endswith("/record"):
            die_at(folder, OBJECT_OF_RECORD)
        write(self, path, data)

    for kind, name, dying in (
        (DiskTier, "_place", dying_place),
        (DiskTier, "commit", dying_commit),
        (DurableTier, "_write", dying_write),
    ):
        setattr(kind, name, dying)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    main(["relay", *sys.argv[2:]], prog_name="keepstep")
