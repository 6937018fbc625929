"""Threads that are needed while the process ends."""

from __future__ import annotations

import threading


def start_or_run(thread: threading.Thread) -> bool:
    """Start ``thread``, or do its work here: Python 3.12 starts no thread after the end of the script.

    Returns:
        Whether it was started, so that it can be joined.
    """
    try:
        thread.start()
    except RuntimeError:
        thread.run()
        return False
    return True
