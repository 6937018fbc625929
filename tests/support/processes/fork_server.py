"""A process that has imported modules and forks, for each request, a child that becomes a Python program.

``python fork_server.py LISTENER MODULE...``: LISTENER is the descriptor of a listening Unix socket. Each connection
brings one request (see ``Request``), with the child's stdin, stdout and stderr, and gets the child's pid; one without
a request is closed once the imports are done. The child is adopted by the nearest subreaper above, which is the test.
It runs the program at the top level of this file. The server ends at the end of its standard input.

A program that ends in order skips the last step of Python, which frees every object: after the imports of torch that
takes 0.3 s of CPU time. It waits for its threads, calls what ``atexit`` and its own ``weakref.finalize`` have, and
flushes its output. A program with another end (an exception, SIGINT) ends as each Python process does.
"""

from __future__ import annotations

import atexit
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
import threading
import time
import types
import warnings
import weakref
from pathlib import Path
from posix import _exit  # os._exit writes the lines that coverage has counted, which atexit or the child does here
from typing import Any, TextIO, TypedDict

PID_BYTES = 8
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
NAMESPACES = Path("/run/netns")
ROOT = str(Path(__file__).resolve().parents[3])
STANDARD = 3
"""Descriptors that come with a request."""


class Request(TypedDict):
    """A JSON object, behind its length in 8 bytes."""

    arguments: list[str]
    """Arguments of ``python``: ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``."""
    environment: dict[str, str]
    folder: str
    namespace: str
    """Name of the network namespace that the process runs in; empty: the server's."""
    new_session: bool
    group: int
    """Process group to join, as ``os.setpgid`` takes it. -1: the server's."""
    dies_with: int
    """Pid of the parent whose end kills the process. 0: none."""
    serves: str
    """Start processes of this program from a fork server of its own, a child of it with the same imports: ``""``: none,
    "all": all Python processes, "scripts": those of ``forked.SERVERS["scripts"]``."""


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
        _exit(0)
    for one in (let_go, told, tell):
        os.close(one)
    os.read(may_go, 1)
    os.close(may_go)
    return 0


def serve_own(request: Request) -> Request:
    """Fork a server for the children of this program. Return in the program, and with their requests in its children.

    The program becomes a subreaper, so that it is the parent of its children as ever.
    """
    sys.path.insert(0, ROOT)
    from tests.support.processes import forked

    del sys.path[0]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    address = listener.getsockname()
    until_end, held = os.pipe()  # the program holds the other end until it ends
    server = os.fork()
    if server == 0:
        os.close(held)
        os.dup2(until_end, 0)
        nothing = os.open(os.devnull, os.O_RDWR)  # not the program's output, which its reader reads to its end
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        return serve(listener)
    listener.close()
    os.close(until_end)
    if request["serves"] == "scripts":
        forked.SERVERS["scripts"] = forked.ForkServer(address=address, pid=server)
    else:
        forked.install(own=address)
    return {**request, "serves": ""}


def become(request: Request) -> None:
    """Set what a new Python process would have."""
    if request["dies_with"]:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != request["dies_with"]:  # it ended before the line above
            os._exit(1)
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
    if (torch := sys.modules.get("torch")) and (threads := os.environ.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(threads.split(",")[0]))  # OpenMP reads the variable when torch is imported
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    streams = {"stdin": stdin, "stdout": like(sys.stdout, lines=os.isatty(1)), "stderr": like(sys.stderr, lines=True)}
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


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


def run(arguments: list[str]) -> None:
    """Run a program at the top level, as Python does. ``arguments``: those of ``python``."""
    if arguments[0] == "-m":
        sys.path[0] = os.getcwd()  # noqa: PTH109
        sys.argv = arguments[1:]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    if arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        name, source = "<string>", arguments[1].encode()
    else:
        name = arguments[0]
        sys.path[0] = os.path.dirname(name)  # noqa: PTH120
        sys.argv = arguments
        with io.open_code(name) as file:
            source = file.read()
    main = types.ModuleType("__main__")
    if name != "<string>":
        main.__file__ = name
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec"), main.__dict__)


def end(code: int) -> None:
    """End this process in order, and leave its memory to the kernel. Return if its output cannot be flushed."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except OSError:
        return
    _exit(code & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, whose end ends this process
    gc.disable()  # imports make no garbage: a fifth of their time is saved
    for module in sys.argv[2:]:
        with warnings.catch_warnings():
            if module.startswith("keepstep"):
                warnings.simplefilter("error")  # as in pytest
            importlib.import_module(module)
    for one in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        one.atexit = False  # torch would take back each operation that it has registered: 40 ms of CPU time
    gc.freeze()
    gc.enable()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    while asked["serves"]:
        asked = serve_own(asked)
    become(asked)
    try:
        run(asked["arguments"])
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            end(ended.code or 0)
        raise
    end(0)
