"""Objects with torchft's methods in place of a Manager, such as ``unittest.mock.create_autospec(Manager)`` in a test.

DDP, optimizers, LocalSGD, DiLoCo and HSDP take their Manager through ``as_manager``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

from torch.distributed import ReduceOp, Work

from keepstep_mesh.config.logging import get_logger

M = TypeVar("M")

log = get_logger("keepstep.manager")

_logged: set[type] = set()
"""Classes of objects in place of a Manager that were logged."""


def as_manager(given: M) -> M:
    """Return ``given``; or with an object that has only torchft's methods, one that does the rest with them.

    A Manager, an object that passes everything on to one, and one in the middle of a rehearsal are returned as they
    are. A mock has every attribute, so that only the type of ``steps`` tells. Classes that are no mocks are logged
    once: one of the script may hide the Manager inside it.
    """
    if hasattr(type(getattr(given, "steps", None)), "add_layout"):
        return given
    kind = type(given)
    if kind not in _logged and not _is_mock(given):
        _logged.add(kind)
        log.warning(
            "object in place of a Manager: groups do not compare the script, and no step is retried or caught up",
            type=f"{kind.__module__}.{kind.__qualname__}",
            reason="it does not have the attribute steps of a Manager",
            remedy="let its __getattr__ return every other attribute from the Manager inside it; ignore this in a test",
        )
    return cast("M", _ManagerLike(given))


def _is_mock(given: object) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(given, mock.NonCallableMock)


class _ManagerLike:
    """A Manager of one group that nothing watches. Its methods are those of ``given``, or do what a step needs."""

    use_async_quorum = init_sync = retry_allreduce = refuse_nonfinite = False
    catching_up = rehearsing = False
    open_number: int | None = None

    def __init__(self, given: Any) -> None:
        self._given = given
        self.steps = self.script_checker = self.common = self
        self._write_backs: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    @property
    def background(self) -> NoReturn:
        raise TypeError(f"a {type(self._given).__name__} in place of a Manager has no background quorum")

    def allreduce(
        self,
        tensor: Any,
        should_quantize: bool = False,
        reduce_op: Any = ReduceOp.AVG,
        *,
        write_back: Callable[[], None] | None = None,
        refill: object = None,  # noqa: ARG002
    ) -> Work:
        if write_back is not None:
            self._write_backs.append(write_back)
        more: dict[str, Any] = {"should_quantize": True} if should_quantize else {}
        if reduce_op != ReduceOp.AVG:
            more["reduce_op"] = reduce_op
        return cast("Work", self._given.allreduce(tensor, **more))

    @contextlib.contextmanager
    def committing(self) -> Iterator[bool]:
        written, self._write_backs = self._write_backs, []
        committed = bool(self._given.should_commit())
        for write_back in written if committed else ():
            write_back()
        yield committed

    def current_step(self) -> int:
        step = self._given.current_step()
        return step if isinstance(step, int) else 0

    def errored(self) -> Exception | None:
        error = self._given.errored()
        return error if isinstance(error, Exception) else None

    def participation(self) -> tuple[int | None, int]:
        rank, groups = self._given.participating_rank(), self._given.num_participants()
        return (rank, groups) if isinstance(groups, int) and groups > 0 else (0, 1)

    def is_healing(self) -> bool:
        return False

    def follow_with(self, *_: object) -> NoReturn:
        raise TypeError(f"catch_up=True needs a keepstep.Manager, not a {type(self._given).__name__}")

    def _nothing(self, *_: object) -> None:
        """Does nothing: no other group compares the script, and the step has no state to end."""

    add_layout = add_module = add_optimizer = compare_only = expect_overflow = cancel = _nothing
    change_begins = change_ended = leave_if_asked = mark_torn = mark_synchronized = _nothing
