"""A host name for which no name server answers. ``socket.getaddrinfo`` is replaced: a test has no resolver."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

DEADLINE = 60.0


@contextmanager
def unanswered_name() -> Iterator[str]:
    """A name whose lookup blocks until the context ends."""
    name, over, look_up = "silent.invalid", threading.Event(), socket.getaddrinfo

    def unanswered(host: Any, *arguments: Any, **how: Any) -> Any:
        if host == name and not how.get("flags", 0) & socket.AI_NUMERICHOST:
            over.wait(DEADLINE)
        return look_up(host, *arguments, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unanswered)
        try:
            yield name
        finally:
            over.set()
