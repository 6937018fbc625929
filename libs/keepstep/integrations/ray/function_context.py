"""The context of the training function in a worker of Ray Train: notices during it, the end of the group after it.

Ray Train runs the function in a thread of a process that lives on. So signals do not reach the Manager, and the end of
the function is not that of the process.
"""

from __future__ import annotations

from types import TracebackType

from keepstep.integrations.ray.node_drains import NodeDrains
from keepstep.integrations.ray.ray_classes import FunctionContext
from keepstep.manager import running_managers
from keepstep.runtime.exits import JobClosedExit
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import Drained, ExitWithReason

log = get_logger("keepstep.integrations.ray")


class GroupEndedError(RuntimeError):
    """This group has left. Ray Train starts it again as often as its ``FailureConfig`` allows."""


class GroupContext(FunctionContext):  # type: ignore[misc]
    """Lets the group leave when Ray drains its node, and shuts its Managers down after the function.

    A group that was drained by an operator, or that comes after the others have finished, ends as if its function had
    returned None.
    """

    def __enter__(self) -> None:
        super().__enter__()
        self._drains = NodeDrains()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._drains.stop()
        for manager in running_managers():
            manager.shutdown()
        if not isinstance(error, ExitWithReason):
            return bool(super().__exit__(kind, error, traceback))
        log.warning("the group has left", reason=error.reason)
        node_ends = self._drains.deadline is not None
        if isinstance(error, JobClosedExit) or (isinstance(error, Drained) and not node_ends):
            return True
        if isinstance(error, Drained):
            self._drains.await_node_end()
            raise GroupEndedError(f"{error.reason}, but the node lives on after the time of the notice") from error
        raise GroupEndedError(error.reason) from error  # a SystemExit would reach Ray Train without its reason
