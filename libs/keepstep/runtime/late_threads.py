"""Threads that are needed while the process ends."""

from __future__ import annotations

from keepstep_mesh.threads.starting import Thread


def start_or_run(thread: Thread) -> bool:
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
