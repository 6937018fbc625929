"""Objects with torchft's methods in place of a Manager, such as ``unittest.mock.create_autospec(Manager)`` in a test.

DDP, optimizers, LocalSGD, DiLoCo and HSDP take their Manager through ``as_manager``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch.distributed import ReduceOp, Work
from torch.futures import Future

from keepstep.process_group.works import writing
from keepstep_mesh.config.logging import get_logger

M = TypeVar("M")

log = get_logger("keepstep.manager")

MAX_NOT_WRITTEN = 10_000
"""Reductions whose results wait for a commit."""

_logged: set[type] = set()
"""Classes of objects in place of a Manager that were logged."""
_likes: WeakValueDictionary[int, _ManagerLike] = WeakValueDictionary()
"""By the address of the object inside: what the model reduces is written when the optimizer commits."""


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
    like = _likes.get(id(given)) or _ManagerLike(given)
    _likes[id(given)] = like
    return cast("M", like)


def _is_mock(given: object) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(given, mock.NonCallableMock)


class _ManagerLike:
    """A Manager of one group that nothing watches. Its methods are those of ``given``, or do what a step needs."""

    use_async_quorum = init_sync = retry_allreduce = refuse_nonfinite = False
    catching_up = rehearsing = False
    open_number: int | None = None
    states_loaded = 0

    def __init__(self, given: Any) -> None:
        self._given = given
        self.steps = self.script_checker = self.common = self.joining = self
        self._write_backs: list[tuple[Work, Callable[[], None]]] = []

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
        more: dict[str, Any] = {"should_quantize": True} if should_quantize else {}
        if reduce_op != ReduceOp.AVG:
            more["reduce_op"] = reduce_op
        if _is_mock(self._given):
            work = cast("Work", self._given.allreduce(tensor, **more))
        else:
            copy = tensor.detach().clone()
            work = _CopiedWork(self._given.allreduce(copy, **more), copy, tensor)
        if write_back is not None:
            if len(self._write_backs) >= MAX_NOT_WRITTEN:
                raise RuntimeError(
                    f"no step of this {type(self._given).__name__} has committed after {MAX_NOT_WRITTEN} reductions, "
                    f"so averages of buffers are not written: give the Optimizer the object that the model was given"
                )
            self._write_backs.append((work, write_back))
        return work

    @contextlib.contextmanager
    def committing(self) -> Iterator[bool]:
        written, self._write_backs = self._write_backs, []
        committed = bool(self._given.should_commit())
        for work, write_back in written if committed else ():
            work.wait()  # it has ended by now
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

    def follow_if_possible(self, *_: object) -> None:
        """Return that the group heals."""

    def turn_of(self, _optimizer: object) -> str:
        return ""

    def _nothing(self, *_: object) -> None:
        """Does nothing: no other group compares the script, and the step has no state to end."""

    heal = add_layout = add_module = add_optimizer = add_reduction = begin_with = compare_only = _nothing
    expect_overflow = heal_instead = cancel = _nothing
    change_begins = change_ended = leave_if_asked = mark_torn = mark_synchronized = _nothing


class _CopiedWork(Work):
    """The reduction of a copy, whose result is written to the tensor once, when the reduction ends.

    A Manager inside with ``retry_allreduce`` repeats no reduction of a tensor that is in no gradient's memory: what the
    model concluded from the first result, such as which parameters no group used, would stay.
    """

    def __init__(self, work: Any, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._tensor = tensor
        self._copy: torch.Tensor | None = copy

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        ok = self._work.wait(timeout) if timeout else self._work.wait()
        self._write()
        return cast("bool", ok)

    def get_future(self) -> Future[Any]:
        def write(future: Future[Any]) -> torch.Tensor:
            future.value()  # raises its error
            self._write()
            return self._tensor

        return cast("Future[Any]", self._work.get_future().then(write))

    def _write(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            with torch.no_grad(), writing([self._tensor]):
                self._tensor.copy_(copy)
