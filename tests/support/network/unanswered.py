"""A name that no name server says anything about. Resolvers cannot be had in a test: the system's call is replaced."""

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
    """Who looks it up waits until this is closed."""
    name, over, look_up = "silent.invalid", threading.Event(), socket.getaddrinfo

    def unanswered(host: Any, *arguments: Any, flags: int = 0, **how: Any) -> Any:
        if host == name and not flags & socket.AI_NUMERICHOST:
            over.wait(DEADLINE)
        return look_up(host, *arguments, flags=flags, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unanswered)
        try:
            yield name
        finally:
            over.set()
