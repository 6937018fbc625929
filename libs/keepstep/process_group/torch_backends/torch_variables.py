"""Environment variables that torch's NCCL backend reads when it is created.

Only keepstep's own backends get these values: they are set while one is created and restored afterwards, so that the
user's other groups keep theirs. They turn torch's watchdog off, which would end this process after a peer has died
(torchrun turns it on), and its dumps, during which the next collective would wait. A wait does not block the CPU, where
an abort could not end it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist

from keepstep.process_group.group_errors import ProcessGroupError

WITHOUT_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}

_lock = threading.Lock()
"""Held while the variables have these values: another thread must not store them as the values to restore."""


def nccl_variables(timeout: timedelta) -> dict[str, str]:
    """Return the variables of a backend whose connections may take ``timeout``."""
    return WITHOUT_WATCHDOG | {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, int(timeout.total_seconds())))}


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block, and restore them."""
    with _lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def refuse_detailed_debugging(name: str) -> None:
    """Raise ProcessGroupError if torch checks each collective with others, which cannot be aborted.

    Args:
        name: class of the process group.
    """
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        raise ProcessGroupError(
            f"{name} cannot run with TORCH_DISTRIBUTED_DEBUG=DETAIL, which adds collectives that no abort ends: set it "
            "to INFO or OFF"
        )
