"""A process that has imported modules and forks, for each request, a child that becomes a Python program.

``python fork_server.py LISTENER MODULE...``: LISTENER is the descriptor of a listening Unix socket. Each connection
brings one request (see ``Request``), with the child's stdin, stdout and stderr, and gets the child's pid; one without
a request is closed once the imports are done. The child is adopted by the nearest subreaper above, which is the test.
It runs the program at the top level of this file and ends as each Python process does, with finalization. The server
ends at the end of its standard input.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any, TextIO, TypedDict

PID_BYTES = 8
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
STANDARD = 3
"""Descriptors that come with a request."""


class Request(TypedDict):
    """A JSON object, behind its length in 8 bytes."""

    arguments: list[str]
    """Arguments of ``python``: ``-m MODULE ...`` or ``FILE ...``."""
    environment: dict[str, str]
    folder: str
    namespace: str
    """Name of the network namespace that the process runs in; empty: the server's."""
    new_session: bool
    group: int
    """Process group to join, as ``os.setpgid`` takes it. -1: the server's."""


def serve(listener: socket.socket) -> Request:
    """Fork for each request; return the request in the child."""
    while True:
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            head, files, _, _ = socket.recv_fds(connection, PID_BYTES, STANDARD)
            if not head:
                continue
            with connection.makefile("rb") as stream:
                request: Request = json.loads(stream.read(int.from_bytes(head)))
            pid = fork()
            if pid:
                connection.sendall(pid.to_bytes(PID_BYTES))
        if not pid:
            listener.close()
            for standard, file in enumerate(files):
                os.dup2(file, standard)
        for file in files:
            os.close(file)
        if not pid:
            return request


def fork() -> int:
    """Fork a child that the subreaper adopts; return its pid, and 0 in the child, once it is adopted."""
    may_go, let_go = os.pipe()
    told, tell = os.pipe()
    if between := os.fork():
        os.close(may_go)
        os.close(tell)
        pid = int.from_bytes(os.read(told, PID_BYTES))
        os.waitpid(between, 0)
        os.close(told)
        os.close(let_go)
        return pid
    if pid := os.fork():
        os.write(tell, pid.to_bytes(PID_BYTES))
        os._exit(0)
    for one in (let_go, told, tell):
        os.close(one)
    os.read(may_go, 1)
    os.close(may_go)
    return 0


def become(request: Request) -> None:
    """Set what a new Python process would have."""
    if request["namespace"]:
        enter(request["namespace"])
    if request["new_session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    streams = {"stdin": stdin, "stdout": like(sys.stdout, lines=os.isatty(1)), "stderr": like(sys.stderr, lines=True)}
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = request["arguments"]


def enter(namespace: str) -> None:
    """Move this process to a network namespace, as ``ip netns exec`` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / namespace).open("rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def like(stream: TextIO, *, lines: bool) -> io.TextIOWrapper:
    """A new stream for the descriptor of ``stream``, flushed after each line if ``lines``."""
    buffered = not os.environ.get("PYTHONUNBUFFERED")
    binary: Any = open(stream.fileno(), "wb", -1 if buffered else 0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        binary, stream.encoding, stream.errors, line_buffering=buffered and lines, write_through=not buffered
    )


def program(path: str) -> tuple[types.CodeType, types.ModuleType]:
    """The code of a script, and the module that it is run in."""
    sys.path[0] = os.path.dirname(path)  # noqa: PTH120
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec"), main


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, whose end ends this process
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
    if sys.argv[0] == "-m":
        sys.path[0] = os.getcwd()  # noqa: PTH109
        module = sys.argv.pop(1)
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    else:
        code, main_module = program(sys.argv[0])
        exec(code, main_module.__dict__)
