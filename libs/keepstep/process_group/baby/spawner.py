"""A process that has imported torch and forks child processes within milliseconds.

A fork of the trainer itself would copy its threads' locks and its CUDA state; a fresh interpreter takes seconds to
import torch. The spawner is single-threaded and uses no device, so that its forks are sound. It ends with its parent,
and its children end with it, even if one of them is stopped: the kernel kills them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

from keepstep.process_group.baby.channel import Channel
from keepstep.process_group.baby.child import Child

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve fork requests on the socket of the first argument, for the process of the second."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then ends its children
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    channel = Channel(socket.socket(fileno=descriptor))
    channel.send({"do": "ready"})
    while (received := channel.receive()) is not None:
        _, (connection,) = received
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            channel.close()
            _die_with(own)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            Child(Channel(socket.socket(fileno=connection))).run()
        os.close(connection)
        handle = os.pidfd_open(pid)
        channel.send({"do": "forked", "pid": pid}, [handle])
        os.close(handle)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread ends that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(0)


if __name__ == "__main__":
    main()
    os._exit(0)  # its parent waits: to free torch's modules takes 0.3 s
