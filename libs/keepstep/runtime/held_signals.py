"""Hold signals back while the training thread must not be interrupted, and handle them right afterwards.

A handler of Python may raise in the main thread, between any two instructions: Ctrl-C does, and so does the handler of
torch's ``DataLoader`` for a worker that died.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes an enum of each handler: 20 us a step, not 3
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2),
)
URGENT = frozenset({signal.SIGINT, signal.SIGTERM})
"""The second one of these is handled at once: what runs in the section may hang."""

Handler = Callable[[int, FrameType | None], object]


class HeldSignals:
    """Holds signals back between ``hold`` and ``release``, whose handler is a function of Python.

    Python calls such a handler in the main thread. In other threads nothing is held back.
    """

    def __init__(self) -> None:
        self.holding = False
        self._handlers: dict[int, Handler] = {}
        """The handlers that this object replaced, by the number of their signal."""
        self._arrived: list[tuple[int, FrameType | None]] = []
        self._pid = os.getpid()

    def hold(self) -> None:
        """Hold signals back from now on. An earlier ``hold`` stays in force."""
        if self.holding:
            return
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler) and handler != self._note:
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        self.holding = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        if not self.holding or os.getpid() != self._pid:  # a forked child has its own life
            handler(number, frame)
            return
        earlier = [one for one in self._arrived if one[0] == number]
        if not earlier:
            self._arrived.append((number, frame))
        elif number in URGENT:
            self._arrived.remove(earlier[0])
            handler(*earlier[0])
            handler(number, frame)

    def release(self) -> None:
        """Handle the signals that have arrived, and hold none back any longer.

        Raises:
            BaseException: raised by a handler, as KeyboardInterrupt. All signals are handled nevertheless.
        """
        if not self.holding:
            return
        self.holding = False  # from here on `_note` hands signals on at once
        try:
            self._handle_arrived()
        finally:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == self._note:
                    _signal.signal(number, handler)

    def _handle_arrived(self) -> None:
        if self._arrived:
            number, frame = self._arrived.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._handle_arrived()
