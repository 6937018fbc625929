"""A log of all steps as JSON lines, for programs (``KEEPSTEP_STEP_LOG=<path>``). Without the variable it is off.

Each line: ``t`` (Unix seconds), ``job``, ``replica_id``, ``group_rank``, ``n`` (1, 2, 3 ... of this process, so that a
missing line shows), ``event``, ``step`` (committed steps after the event), ``quorum_id``, and the fields of the event:

* ``started``, ``loaded`` (the user's checkpoint), ``torn``, ``diverged`` (the weights were found to differ from those
  of the other groups): ``lineage`` of this group
* ``follows`` (from the state of ``step`` on, the group takes part without weights), ``caught_up`` (it has them),
  ``gave_up`` (it is back at its own): ``lineage``
* ``quorum`` (the quorum has formed, and its process group is built): ``epoch``, ``members``, ``participants`` (all)
* ``healed``: ``epoch``, ``lineage`` of the loaded state, ``source``, ``seconds``, ``bytes``
* ``committed``: ``epoch``, ``participants``, ``lineage`` of the state before the step; only if true: ``behind`` (the
  group took part without healing, or without weights), ``synchronized`` (the script declared all groups equal after the
  step); and ``new_lineage``, if it is not the quorum_id
* ``retried`` (the group repeats the step under another quorum, with the same gradients): ``epoch`` and ``quorum_id``
  of the quorum that failed, ``reason``
* ``discarded``: ``epoch``, ``reason``

``keepstep check-history`` reads it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

from keepstep.group.quorum_plan import QuorumPlan
from keepstep_mesh.config.disk_space import write_failure
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.config.rotation import is_moved

log = get_logger("keepstep.step_log")

STEP_LOG_ENV = "KEEPSTEP_STEP_LOG"


class StepLog:
    """Appends one line for each event. Several processes may share a file. ValueError if it cannot be opened.

    A file that was renamed, as logrotate does, is left, and a new one begins.
    """

    def __init__(self, job: str, replica_id: str, group_rank: int) -> None:
        path = os.environ.get(STEP_LOG_ENV) or ""
        self._path = Path(path).absolute()  # the script may change to another folder
        self._who = {"job": job, "replica_id": replica_id, "group_rank": group_rank}
        self._lock = threading.Lock()
        self._lines = 0
        self._failures = LogLimiter(seconds=600.0)
        self._cut = False
        """Whether the file ends in the middle of a line."""
        self._plan: QuorumPlan | None = None
        """The last plan, written or equal to the one that was written."""
        try:
            self._file = _opened(self._path) if path else -1
        except OSError as error:
            raise ValueError(f"{STEP_LOG_ENV}={path} cannot be opened for writing: {error.strerror}") from error

    def write(self, event: str, step: int, quorum_id: int, **detail: object) -> None:
        """Append a line. From any thread; does nothing if the log is off."""
        if self._file < 0:
            return
        with self._lock:
            if self._file >= 0:
                n = self._lines = self._lines + 1
                head = {"t": time.time(), **self._who, "n": n, "event": event, "step": step, "quorum_id": quorum_id}
                self._append((json.dumps({**head, **detail}) + "\n").encode())

    def _append(self, line: bytes) -> None:
        try:
            if is_moved(self._path, self._file):
                new = _opened(self._path)
                os.close(self._file)
                self._file, self._cut = new, False
            line = b"\n" + line if self._cut else line
            written = os.write(self._file, line)  # one write: lines of two processes never mix
            self._cut = written < len(line)
            if self._cut:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # the missing line shows in ``n``; the step goes on
            if self._failures.allows(time.monotonic()):
                log.error("step log not written", path=str(self._path), reason=write_failure(error, self._path))

    def quorum(self, step: int, plan: QuorumPlan, *, built: bool) -> None:
        """Append a line if the process group was ``built``, or the quorum differs from the last one."""
        if self._file < 0:
            return
        before, self._plan = self._plan, plan  # an equal one too, so that the next comparison sees the same list object
        if not (built or _differ(before, plan)):
            return
        members = list(plan.replica_ids)
        self.write("quorum", step, plan.quorum_id, epoch=plan.epoch, members=members, participants=len(members))

    def close(self) -> None:
        """Close the file. Later lines are dropped."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def _differ(before: QuorumPlan | None, plan: QuorumPlan) -> bool:
    if before is None or (before.epoch, before.quorum_id) != (plan.epoch, plan.quorum_id):
        return True
    return plan.members is not before.members and plan.replica_ids != before.replica_ids
