"""Complete a torch future, with a value or an error, and in any case.

The process ends if a future cannot be completed, for example without memory: its readers would wait until their
deadline, or for ever.
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

from torch.futures import Future

from keepstep.runtime.exits import must_succeed


def complete_future(future: Future[Any], value: object, error: Exception | None = None) -> None:
    """Complete ``future`` with ``value``, or with ``error``, or with the error of this attempt."""
    if error is None:
        try:
            future.set_result(value)
        except Exception as failed:
            if future.done():
                raise
            error = failed
        else:
            return
    fail_future(future, error)


@must_succeed("the completion of a future")
def fail_future(future: Future[Any], error: Exception) -> None:
    """Complete ``future`` with ``error``. Each reader gets a copy of it.

    ``Future.set_exception`` raises one object for all readers. Its traceback refers to their frames, and these refer to
    the future. C++ owns the future, so the garbage collector does not see this cycle, and the tensors, threads and
    sockets of a failed collective would never be freed.
    """

    def raise_copy(stored: Exception) -> NoReturn:
        raise _copy(stored)

    future._set_unwrap_func(raise_copy)  # noqa: SLF001  # as Future.set_exception does
    future.set_result(_copy(error))


def noted_future(future: Future[Any], note: str) -> Future[Any]:
    """Return a future with the value of another one, or with its error and a note that says what to do."""

    def result(done: Future[Any]) -> Any:
        try:
            return done.value()
        except Exception as error:  # noqa: BLE001  raised to each reader
            error.add_note(note)
            return _copy(error)

    def raise_copy(stored: Any) -> None:
        if isinstance(stored, Exception):
            raise _copy(stored)

    noted = future.then(result)  # an error of this callback would reach readers as the text of a RuntimeError
    noted._set_unwrap_func(raise_copy)  # noqa: SLF001  as in ``fail_future``
    return noted


def _copy(error: Exception) -> Exception:
    """Return an error of the same type, arguments and attributes, without traceback, cause and context.

    An error that cannot be copied, because its type has a constructor of its own, is returned itself: a future that
    never completes would be worse than a cycle.
    """
    with contextlib.suppress(Exception):
        copy = type(error).__new__(type(error), *error.args)
        copy.__dict__.update(error.__dict__)
        if str(copy) == str(error):
            return copy
    return error
