"""The parent's handle of the spawner, and of the child processes that it forks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

from keepstep.process_group.baby.channel import Channel
from keepstep.process_group.group_errors import ProcessGroupError
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.fork_safety import claim, tell_children
from keepstep_mesh.threads.starting import Thread

log = get_logger("keepstep.process_group")

CHILD_START_SECONDS = 60.0
"""Limit of the start of a spawner, which imports torch."""
FORK_SECONDS = 10.0
"""Limit of a fork."""
CHILD_EXIT_SECONDS = 5.0
"""Limit of the wait for a killed process."""


class ChildProcess:
    """One child process and the connection with it.

    Args:
        channel: connection with the child.
        pidfd: of the child, which has no other name that is never reused.
    """

    def __init__(self, channel: Channel, pidfd: int, pid: int) -> None:
        self.channel = channel
        self.pid = pid
        self._pidfd = pidfd

    def kill(self) -> None:
        """End the child, whatever it does. Does not wait."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def discard(self) -> None:
        """Kill the child and free its resources."""
        self.kill()
        self.close()

    def close(self) -> None:
        """Wait until the killed child has ended, and free its resources. Call it once."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(CHILD_EXIT_SECONDS * 1000):
            log.warning("a killed child process has not ended", pid=self.pid, limit_seconds=CHILD_EXIT_SECONDS)
        os.close(self._pidfd)
        self.channel.close()


class Spawner:
    """Starts child processes. All process groups of a trainer share one; the last one ends it.

    Use it as a context manager for as long as children may be started.
    """

    _shared: Spawner | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._users = 0
        self._starting: Future[Channel] = Future()
        self._forking = threading.Lock()
        self._of_parent = False
        tell_children(self)
        self._keeper = Thread(target=self._keep, name="keepstep-spawner", daemon=True)
        self._keeper.start()

    def forked(self) -> None:
        """Forget the spawner in a forked child, so that only the parent ends it."""
        self._of_parent = True
        Spawner._shared = None
        Spawner._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process runs, or starts."""
        return self._keeper.is_alive()

    @classmethod
    def shared(cls) -> Spawner:
        """Return the spawner of this process, and count one user more. Call ``release`` once for each call."""
        with cls._lock:
            if cls._shared is None or not cls._shared.alive:
                cls._shared = Spawner()
            spawner = cls._shared
            spawner._users += 1  # noqa: SLF001  of this class
            return spawner

    def release(self) -> None:
        """Count one user less, and end the process after the last one."""
        if self._of_parent:
            return
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if Spawner._shared is self:
                Spawner._shared = None
        with contextlib.suppress(ProcessGroupError):
            self._channel().interrupt()  # the process reads the end of the connection, and exits
        self._keeper.join(CHILD_EXIT_SECONDS)

    def fork(self) -> ChildProcess:
        """Start a child process.

        Raises:
            ProcessGroupError: the spawner ended, or did not answer in time.
        """
        control = self._channel()
        ours, theirs = socket.socketpair()
        claim(ours)
        with self._forking:
            try:
                control.send({"do": "fork"}, [theirs.fileno()])
                received = control.receive(time.monotonic() + FORK_SECONDS)
            except (TimeoutError, OSError) as error:
                ours.close()
                control.interrupt()  # it ends: the next fork would read its late answer
                raise ProcessGroupError(f"the spawner of child processes did not answer: {error}") from error
            finally:
                theirs.close()
        if received is None:
            ours.close()
            raise ProcessGroupError("the spawner of child processes has ended; configure the process group again")
        message, (pidfd,) = received
        return ChildProcess(Channel(ours), pidfd, message["pid"])

    def _channel(self) -> Channel:
        return self._starting.result(CHILD_START_SECONDS + CHILD_EXIT_SECONDS)

    def _keep(self) -> None:
        """Start the process and wait for its end: the kernel kills it when the thread ends that started it."""
        ours, theirs = socket.socketpair()
        claim(ours)
        channel = Channel(ours)
        try:
            process = _start(theirs)
        except Exception as error:  # noqa: BLE001  such as OSError: no memory for a process
            channel.close()
            self._starting.set_exception(ProcessGroupError(f"the spawner of child processes did not start: {error!r}"))
            return
        finally:
            theirs.close()
        try:
            if channel.receive(time.monotonic() + CHILD_START_SECONDS) is None:
                raise ProcessGroupError("the spawner of child processes did not start; see its output above")
            self._starting.set_result(channel)
        except Exception as error:  # noqa: BLE001  raised where a child is needed
            process.kill()
            self._starting.set_exception(ProcessGroupError(str(error) or f"no start within {CHILD_START_SECONDS} s"))
        process.wait()
        channel.close()


def _start(control: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  our own interpreter and module
        [sys.executable, "-P", "-m", "keepstep.process_group.baby.spawner", str(control.fileno()), str(os.getpid())],
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
