"""Threads that are needed although none can start: while the process ends, or without memory."""

from __future__ import annotations

from keepstep_mesh.threads.starting import Thread


def start_or_run(thread: Thread) -> bool:
    """Start ``thread``, or do its work here: Python 3.12 starts no thread after the end of the script.

    Nor does a thread start without memory.

    Returns:
        Whether it was started, so that it can be joined.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        thread.run()
        return False
    return True
