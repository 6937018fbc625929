"""Complete a torch future with an error."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.futures import Future


def fail_future(future: Future[Any], error: Exception) -> None:
    """Complete ``future`` with ``error``; each reader gets a copy of it.

    ``Future.set_exception`` raises one object for all readers, so its traceback refers to their frames, and these to
    the future. C++ owns the future: the garbage collector does not see this cycle, and the tensors, threads and sockets
    of a failed collective would never be freed.
    """

    def raise_copy(stored: Exception) -> NoReturn:
        raise _copy(stored)

    future._set_unwrap_func(raise_copy)  # noqa: SLF001  # as Future.set_exception does
    future.set_result(_copy(error))


def _copy(error: Exception) -> Exception:
    """The same type, arguments and attributes; no traceback, cause or context."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy
