"""End a command early, in a way that undoes its fault."""

from __future__ import annotations

import asyncio
import signal
from typing import Any


def cancel_at_signals(task: asyncio.Task[Any]) -> None:
    """Cancel ``task`` at SIGINT, SIGTERM, and, unless it is ignored as under ``nohup``, SIGHUP of a lost terminal."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,))):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
