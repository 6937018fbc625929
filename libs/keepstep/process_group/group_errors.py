"""Errors of process groups."""

from __future__ import annotations

from datetime import timedelta

from keepstep_mesh.errors import KeepstepError


class ProcessGroupError(KeepstepError):
    """A collective failed, or the group is not configured. The next ``configure`` makes the group usable again."""


class UnsupportedCollectiveError(ProcessGroupError):
    """The backend does not have this operation for tensors of this dtype. No peer caused it."""


class ProcessGroupAbortedError(ProcessGroupError):
    """``abort`` ended the operation."""


class ProcessGroupTimeoutError(TimeoutError, ProcessGroupError):  # in this order, ``__new__`` is that of OSError
    """An operation did not end in time."""


def timed_out(what: str, limit: timedelta) -> ProcessGroupTimeoutError:
    """Return the error of ``what``, which did not end within ``limit``."""
    late = f"{what} timed out after {limit.total_seconds():g} seconds"
    return ProcessGroupTimeoutError(f"{late} and aborted the process group: a peer is stuck, slow or disconnected")
