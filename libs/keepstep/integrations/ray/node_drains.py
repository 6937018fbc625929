"""Notices that Ray takes a node away: they let the group on it leave at the end of its step.

Ray Train has a watcher of its own, but not for runs with replica groups.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

from keepstep.integrations.ray.ray_classes import ray
from keepstep.manager import running_managers
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.threads.starting import Thread

log = get_logger("keepstep.integrations.ray")

WITHOUT_DEADLINE_SECONDS = 120.0
"""How long a group that has left waits for the end of its node, if the notice has no deadline."""
AFTER_DEADLINE_SECONDS = 30.0
"""How long it waits beyond the deadline."""
WATCH_STOP_SECONDS = 5.0
"""Limit for the watch to end; it may wait for an answer of Ray's head node."""


class NodeDrains:
    """Watches in a thread whether Ray drains the node of this process, and lets its Managers leave then."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        """Unix time in seconds at which the node ends; 0: unknown; None: the node stays."""
        self._node = ray.get_runtime_context().get_node_id()
        self._seconds = float(os.environ.get("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "5"))
        self._end = threading.Event()
        self._thread = Thread(target=self._watch, name="keepstep-node-drains", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                draining = ray._private.state.state.get_draining_nodes()  # noqa: SLF001  as Ray Train's own watcher
            except Exception as error:  # noqa: BLE001  any failure of Ray's client; the next poll may succeed
                log.warning("cannot ask Ray which nodes it drains; asking again", reason=str(error))
                continue
            if self._node in draining and not self._end.is_set():
                self._leave(draining[self._node] / 1000)

    def _leave(self, deadline: float) -> None:
        """Let every Manager leave, also one made after the notice. A spare has half of the time that is left."""
        if self.deadline is None:
            log.warning("Ray drains this node; the group leaves", node=self._node, deadline=deadline)
        self.deadline = deadline
        notice = timedelta(seconds=max(0.0, (deadline - time.time()) / 2)) if deadline else None
        for manager in running_managers():
            manager.leave_soon("Ray drains its node", notice)

    def stop(self) -> None:
        """End the thread. If it waits for an answer of Ray, it ends after that, without effect."""
        self._end.set()
        self._thread.join(WATCH_STOP_SECONDS)

    def await_node_end(self) -> None:
        """Wait until the node ends and this process with it, so that Ray Train counts a preemption, not a failure."""
        seconds = self.deadline - time.time() + AFTER_DEADLINE_SECONDS if self.deadline else WITHOUT_DEADLINE_SECONDS
        time.sleep(max(0.0, seconds))  # the end of the node kills this process in the meantime
