"""What became of each step, as JSON lines for programs (``KEEPSTEP_STEP_LOG=<path>``). Nothing is written without it.

Each line: ``t`` (Unix seconds), ``job``, ``replica_id``, ``group_rank``, ``n`` (1, 2, 3 ... of this process, so that a
missing line shows), ``event``, ``step`` (committed steps after the event), ``quorum_id``, and what the event adds:

* ``started``, ``loaded`` (the user's checkpoint), ``torn`` (its state is of no step now), ``diverged`` (its weights
  were found to differ from the others'): ``lineage`` that it holds
* ``quorum`` (this group is in it, and its process group is built): ``epoch``, ``members``, ``participants`` (all)
* ``healed``: ``epoch``, ``lineage`` taken over, ``source``, ``seconds``, ``bytes``
* ``committed``: ``epoch``, ``participants``, ``lineage`` of the state that it started from; only where it is so:
  ``behind`` (it took part without healing), ``synchronized`` (the script said that all are equal after it),
  ``new_lineage`` (if it is not the quorum_id)
* ``discarded``: ``epoch``, ``reason``

``keepstep check-history`` reads it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time

from keepstep.group.quorum_plan import QuorumPlan
from keepstep_mesh.config.logging import get_logger

log = get_logger("keepstep.step_log")

STEP_LOG_ENV = "KEEPSTEP_STEP_LOG"


class StepLog:
    """Appends one line an event; several processes may share a file. ValueError for a file that cannot be written."""

    def __init__(self, job: str, replica_id: str, group_rank: int) -> None:
        path = os.environ.get(STEP_LOG_ENV)
        self._who = {"job": job, "replica_id": replica_id, "group_rank": group_rank}
        self._lock = threading.Lock()
        self._lines = 0
        self._full = False
        """The last line could not be written, which was logged."""
        self._cut = False
        """What is in the file ends in the middle of a line."""
        self._plan: QuorumPlan | None = None
        """The plan of the quorum before, written or equal to what was written."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else -1
        except OSError as error:
            raise ValueError(f"{STEP_LOG_ENV}={path} cannot be written: {error.strerror}") from error

    def write(self, event: str, step: int, quorum_id: int, **detail: object) -> None:
        if self._file < 0:
            return
        with self._lock:
            if self._file >= 0:
                n = self._lines = self._lines + 1
                head = {"t": time.time(), **self._who, "n": n, "event": event, "step": step, "quorum_id": quorum_id}
                self._append((json.dumps({**head, **detail}) + "\n").encode())

    def _append(self, line: bytes) -> None:
        line = b"\n" + line if self._cut else line
        try:
            written = os.write(self._file, line)  # one write: lines of two processes never mix
            self._cut = written < len(line)
            if self._cut:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # the missing line shows in ``n``; the step goes on
            if not self._full:
                log.error("step log not written", reason=str(error))
            self._full = True
        else:
            self._full = False

    def quorum(self, step: int, plan: QuorumPlan, *, built: bool) -> None:
        """Written when its process group was ``built``, or anything of it differs from the one before."""
        if self._file < 0:
            return
        before, self._plan = self._plan, plan  # an equal one too: lists that are one object are not compared
        if not (built or _differ(before, plan)):
            return
        members = list(plan.replica_ids)
        self.write("quorum", step, plan.quorum_id, epoch=plan.epoch, members=members, participants=len(members))

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def _differ(before: QuorumPlan | None, plan: QuorumPlan) -> bool:
    if before is None or (before.epoch, before.quorum_id) != (plan.epoch, plan.quorum_id):
        return True
    return plan.members is not before.members and plan.replica_ids != before.replica_ids
