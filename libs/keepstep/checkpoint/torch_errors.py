"""Errors of keepstep that are torch's ``CheckpointException`` too, for scripts that catch it.

``CheckpointException`` of torch 2.13 inherits ``BaseException``, and its import takes as long as that of torch. A
script that catches it has imported it, so the class is joined to an error at that moment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from keepstep.state.errors import CheckpointError
from keepstep_mesh.errors import KeepstepError

_FAILED_RANK = re.compile(r"\brank (\d+) failed")


@contextmanager
def errors_of_torch(rank: int | None = None) -> Iterator[None]:
    """Raise errors of keepstep and of torch as both.

    Args:
        rank: of this process, for ``failures``. Default: that of torch.distributed, or 0.
    """
    try:
        yield
    except KeepstepError as error:
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        join_torch(error, rank if rank is not None else torch.distributed.get_rank() if initialized else 0)
        raise
    except BaseException as error:
        api = sys.modules.get("torch.distributed.checkpoint.api")
        if api is None or type(error) is not api.CheckpointException:
            raise
        joined = CheckpointError(str(error))
        _join(joined, api.CheckpointException, vars(error)["_failures"])
        raise joined from error


def join_torch(error: KeepstepError, rank: int) -> None:
    """Let ``except CheckpointException`` catch ``error``, if the process has imported that class."""
    api = sys.modules.get("torch.distributed.checkpoint.api")
    if api is None or isinstance(error, api.CheckpointException):
        return
    failed = _FAILED_RANK.search(str(error))
    wrapped = api._wrap_exception(error)  # noqa: SLF001  the pair that `failures` documents
    _join(error, api.CheckpointException, {int(failed[1]) if failed else rank: wrapped})


def _join(error: Any, of_torch: Any, failures: dict[int, Any]) -> None:
    kind: Any = type(error)
    error.__class__ = _joined(kind, of_torch)
    vars(error)["_failures"] = failures


@cache
def _joined(kind: Any, of_torch: Any) -> Any:
    """Return a class that inherits both. Its instances are pickled as ``kind``, without ``failures``."""

    def reduce(error: Any) -> tuple[Any, ...]:
        return kind, error.args, {name: value for name, value in vars(error).items() if name != "_failures"}

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, of_torch), {**names, "__str__": kind.__str__, "__reduce__": reduce})
