"""Runs inside the template process: let ``template_imports`` do the imports, then fork a process for each start.

Standard library only, and no other module of keepstep: a rank must not have modules that its script does not import.
Messages over the socket are JSON objects, each behind its length in ``LENGTH_BYTES`` bytes; descriptors come with the
length. The supervisor sends ``Orders`` once, then a ``Start`` for each rank. The template sends a ``Report`` once, then
each rank its pid, in ``LENGTH_BYTES`` bytes.

A rank is a grandchild: the process in between ends at once, so that the supervisor, a subreaper, adopts the rank. One
rank is always forked ahead, and reads the next ``Start`` from the socket itself.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from keepstep_cli.running.warm.template_imports import Orders, Preload

VARIABLE = "KEEPSTEP_TEMPLATE"
"""Descriptor of the template's socket. No rank has this variable."""
AT_START = "keepstep_at_start"
"""Attribute of ``os.environ`` for ``keepstep.runtime.learned_imports``: the environment of the start."""
LENGTH_BYTES = 8
GO = b"g"
STANDARD = 3
"""Descriptors of a start: standard output, standard error, and the pipe that lets it go."""
PR_SET_PDEATHSIG = 1
PR_SET_NAME, PR_GET_NAME = 15, 16
NAME, NAME_AHEAD = b"keepstep-warm", b"keepstep-next"
"""Process names of the template, and of the rank that is forked ahead once it dies with the supervisor."""
NEXT_FORK_SECONDS = 2.0
"""Time after a start in which the next rank is forked only if it is needed: the first one needs the processor."""
FORK_AGAIN_SECONDS = 0.1
"""Delay before the next fork after one that failed."""
CANNOT_START = 71
"""Exit code (EX_OSERR): a script that fails ends with 1."""
TRACERS = ("coverage", "pydevd", "debugpy", "viztracer")


class Start(TypedDict):
    environment: dict[str, str]


def serve(folder: str, loaded: set[str], preload_type: type[Preload]) -> bool:
    """Return in each rank, before its script runs: whether it imported another ``sitecustomize``.

    Args:
        folder: that of this ``sitecustomize``.
        loaded: names of the modules that each Python with this environment has at this point.
        preload_type: ``Preload`` of ``template_imports``, which is not in ``sys.modules``.
    """
    connection = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
    connection.set_inheritable(False)
    orders: Orders = received(connection)[0]
    os.environ.pop("PYTHONPATH")
    if orders["python_path"] is not None:
        os.environ["PYTHONPATH"] = orders["python_path"]
    sys.path[:] = [one for one in sys.path if one != folder]
    libc = ctypes.CDLL(None, use_errno=True)
    usual_name = ctypes.create_string_buffer(16)
    libc.prctl(PR_GET_NAME, usual_name, 0, 0, 0)
    libc.prctl(PR_SET_NAME, NAME, 0, 0, 0)
    own = set(sys.modules) - loaded - set(orders["learned"])
    preload = preload_type(orders, partial(send, connection))
    found = preload.of_site(_next_sitecustomize)
    if (tracer := _tracer()) is not None:
        send(connection, {"problems": [[tracer, []]], "final": True})
        os._exit(0)
    report = preload.run()
    if orders["learned"]:
        for name in own:
            del sys.modules[name]
    gc.collect()
    send(connection, report)
    start, files = _forked_start(connection, partial(_die_with, orders["supervisor"], libc))
    connection.close()
    _become(start, files, {one: preload.after.get(one) for one in report["set"]})
    preload.renew_generators()
    libc.prctl(PR_SET_NAME, usual_name, 0, 0, 0)
    return found


def _next_sitecustomize() -> bool:
    """Import the ``sitecustomize`` that the ranks have, in the place of this one. Return whether one exists."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return False
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return True


def _tracer() -> str | None:
    """Return a debugger, profiler or coverage that is active, as a sentence; None: none."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a trace or profile function is set when Python starts"
    if (tracemalloc := sys.modules.get("tracemalloc")) is not None and tracemalloc.is_tracing():
        return "tracemalloc is active"
    return next((f"{one} is loaded when Python starts" for one in TRACERS if one in sys.modules), None)


def _forked_start(connection: socket.socket, die_with_supervisor: Callable[[], None]) -> tuple[Start, list[int]]:
    """Fork a rank ahead, which waits for its start, again and again. Return in the ranks, with their starts.

    The template ends with the supervisor's end of the socket.
    """
    hung_up = select.poll()
    hung_up.register(connection, select.POLLIN)
    while True:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        taken, take = os.pipe()
        adopted, adopt = os.pipe()
        try:
            between = os.fork()
        except OSError:
            between = -1
        if between == 0:
            try:
                if os.fork():
                    os._exit(0)
            except OSError:
                os._exit(CANNOT_START)
            os.setsid()  # before the supervisor knows the pid and may signal the session
            os.close(taken)
            os.close(adopt)
            if os.read(adopted, 1) != GO:  # the template ended
                os._exit(CANNOT_START)
            os.close(adopted)
            die_with_supervisor()
            return _taken_start(connection, take)
        os.close(take)
        os.close(adopted)
        if between > 0:
            os.waitpid(between, 0)
            with contextlib.suppress(BrokenPipeError):  # the rank was killed
                os.write(adopt, GO)
        os.close(adopt)
        in_use = os.read(taken, 1) == GO
        os.close(taken)
        pause = NEXT_FORK_SECONDS if in_use else FORK_AGAIN_SECONDS
        if any(event & select.POLLHUP for _, event in hung_up.poll(1e3 * pause)):
            os._exit(0)
        if not in_use:
            time.sleep(FORK_AGAIN_SECONDS)  # nothing tells when the kernel can fork again


def _die_with(supervisor: int, libc: ctypes.CDLL) -> None:
    """Let the kernel end this process with the supervisor, its parent."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the line above
        os._exit(CANNOT_START)
    libc.prctl(PR_SET_NAME, NAME_AHEAD, 0, 0, 0)


def _taken_start(connection: socket.socket, take: int) -> tuple[Start, list[int]]:
    """Wait for a start, in a rank that the supervisor has adopted."""
    try:
        start, files = received(connection)
    except EOFError:
        os._exit(0)
    connection.sendall(os.getpid().to_bytes(LENGTH_BYTES))
    with contextlib.suppress(BrokenPipeError):  # the template ended
        os.write(take, GO)
    os.close(take)
    return start, files


def _become(start: Start, files: list[int], changed: dict[str, str | None]) -> None:
    """Set what a new process would have. Ends this process if the supervisor has given up the start."""
    output, errors, may_go = files
    if os.read(may_go, 1) != GO:
        os._exit(CANNOT_START)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard, one in enumerate((nothing, output, errors)):
        os.dup2(one, standard)
    for one in (nothing, *files):
        os.close(one)
    os.environ.clear()
    os.environ.update(start["environment"])
    vars(os.environ)[AT_START] = start["environment"]  # /proc/self/environ is that of the template
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path_importer_cache.clear()
    _renew_state()


def _renew_state() -> None:
    """Draw again what modules draw at their import. ``random`` does it itself."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    if (threading := sys.modules.get("threading")) is not None:
        threading.main_thread()._set_native_id()  # a fork leaves that of the parent (seen with Python 3.11)
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        now = time.time()
        logging._startTime = now if isinstance(logging._startTime, float) else time.time_ns()


def send(connection: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    connection.sendall(len(body).to_bytes(LENGTH_BYTES) + body)


def received(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return a message and its descriptors. Raises EOFError."""
    found = array.array("i")
    head, extra, _, _ = connection.recvmsg(LENGTH_BYTES, socket.CMSG_SPACE(STANDARD * found.itemsize))
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    if len(head) < LENGTH_BYTES:
        raise EOFError
    left, body = int.from_bytes(head), b""
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            raise EOFError
        body, left = body + part, left - len(part)
    return json.loads(body), list(found)
