"""What became of each step, as JSON lines for programs (``KEEPSTEP_STEP_LOG=<path>``). Nothing is written without it.

Each line: ``t`` (Unix seconds), ``replica_id``, ``group_rank``, ``event`` (``quorum``: a new process group was built;
``committed``, ``discarded``, ``healed``), ``step`` (committed steps after the event), ``quorum_id``, and what the event
adds: ``participants``, ``reason``, ``seconds``, ``bytes``, ``source``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

STEP_LOG_ENV = "KEEPSTEP_STEP_LOG"


class StepLog:
    """Appends one line an event; several processes may share a file."""

    def __init__(self, replica_id: str, group_rank: int) -> None:
        path = os.environ.get(STEP_LOG_ENV)
        self._who = {"replica_id": replica_id, "group_rank": group_rank}
        self._lock = threading.Lock()
        self._file = os.open(Path(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else -1

    def write(self, event: str, step: int, quorum_id: int, **detail: object) -> None:
        if self._file < 0:
            return
        line = {"t": time.time(), **self._who, "event": event, "step": step, "quorum_id": quorum_id, **detail}
        with self._lock:
            if self._file >= 0:
                os.write(self._file, (json.dumps(line) + "\n").encode())  # one write: lines of two processes never mix

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
