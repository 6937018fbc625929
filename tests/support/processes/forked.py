"""Let `keepstep` commands and scripts of the tests start from fork servers, which have done the slow imports.

``install`` changes ``subprocess.Popen``, on which asyncio builds too, so that a test starts processes as anybody does
and signals, pipes, exit codes and orphans are those of real processes. A command that a fork server cannot start the
same way (other flags of Python, other ``PYTHON`` variables, inherited descriptors, a ``preexec_fn``) starts as ever.

A program ``python -m`` with ``FORKS`` in its environment, such as `keepstep run`, is forked from a process that has
torch, and starts its own Python processes, such as trainers, from a fork server too: a child of the program.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.processes.fork_server import PID_BYTES, Request

PR_SET_CHILD_SUBREAPER = 36
SERVER = Path(__file__).with_name("fork_server.py")
TESTS = SERVER.parents[2]
EXAMPLES = TESTS.parent / "examples"

FORKS = "TESTS_FORK_SERVER"
"""Variable of a command whose Python processes start from a fork server. They do not inherit it."""
TRAINING = re.compile(r"^(import|from) .*\btorch\b", re.MULTILINE)

COMMANDS = (
    "keepstep_cli.main",
    "keepstep_cli.asking.tables",
    "keepstep_cli.asking.transfers",
    "keepstep_cli.running.launcher",
    "keepstep_chaos.histories.reading",
    "keepstep_lighthouse.app",
    "keepstep_metrics.app",
    "keepstep_relay.app",
)
"""Imports of `keepstep` commands."""
SCRIPTS = (
    "keepstep.checkpointing",
    "keepstep.coordination",
    "keepstep.ddp",
    "keepstep.lifecycle.background_quorum",
    "keepstep.manager",
    "keepstep.one_copy",
    "keepstep.sharded",
    "keepstep_cli.main",
    "keepstep_cli.running.launcher",
    "keepstep_chaos.histories.reading",
    "keepstep_lighthouse.app",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.utils.data",
)
"""Imports of trainers and peers, and of commands that start some. The first optimizer of a process imports
torch._dynamo, and its first Manager what is below keepstep.lifecycle."""
WORKERS = (
    "torch",
    *SCRIPTS,
)
"""Imports of pytest's processes, whose scripts come from fork servers that are forked off them. No module of a plugin
of pytest is here: pytest rewrites their assertions when it imports them."""
EXECNET = "import sys;exec(eval(sys.stdin.readline()))"
"""Program of a process of pytest-xdist."""


class ForkServer:
    """Starts at the first use, unless ``address`` is that of a running one, whose end is the caller's, with its pid."""

    def __init__(self, *modules: str, address: bytes = b"", pid: int = 0) -> None:
        self._modules = modules
        self._starting = threading.Lock()
        self._address = address
        self.pid = pid
        self.process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        with self._starting:
            if self._address:
                return
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind("")  # an abstract address of the kernel's choice
                listener.listen()
                self._address = listener.getsockname()
                self.process = subprocess.Popen(
                    [sys.executable, SERVER, str(listener.fileno()), *self._modules],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                )
                self.pid = self.process.pid

    def wait(self) -> None:
        """Start it, and wait until it has imported its modules."""
        self._start()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    def spawn(self, request: Request, standard: Sequence[int]) -> int:
        """Return the pid of a new process, a child of this one. ``standard``: its stdin, stdout and stderr."""
        self._start()
        body = json.dumps(request).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            socket.send_fds(connection, [len(body).to_bytes(PID_BYTES)], standard)
            connection.sendall(body)
            connection.shutdown(socket.SHUT_WR)
            pid = int.from_bytes(connection.recv(PID_BYTES))
        if not pid:
            raise RuntimeError(f"the fork server of {', '.join(self._modules)} ended")
        return pid

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(60)
            self.process, self._address, self.pid = None, b"", 0


SERVERS = {"commands": ForkServer(*COMMANDS), "scripts": ForkServer(*SCRIPTS), "workers": ForkServer(*WORKERS)}
_own: ForkServer | None = None
"""The server of this process, a command with ``FORKS`` in its environment."""


def server_of(arguments: Sequence[str]) -> ForkServer | None:
    """The server that has what a command imports."""
    match arguments:
        case [sys.executable, "-m" | "-c", _, *_] if _own is not None:
            return _own
        case [sys.executable, path, *_] if _own is not None and path.endswith(".py"):
            return _own
        case [sys.executable, "-u", "-c", code] if code == EXECNET:
            return SERVERS["workers"]
        case [sys.executable, "-m", "keepstep_cli", *_]:
            return SERVERS["commands"]
        case [sys.executable, "-c", code, *_] if TRAINING.search(code):
            return SERVERS["scripts"]
        case [sys.executable, "-m", module, *_] if module.startswith("tests.support."):
            return SERVERS["scripts"]
        case [sys.executable, path, *_] if path.endswith(".py") and path != str(SERVER):
            return SERVERS["scripts"] if {TESTS, EXAMPLES} & set(Path(path).parents) else None
    return None


_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
USUAL = {
    "executable": None, "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False,
    "restore_signals": True, "gid": None, "gids": None, "uid": None, "umask": -1,
}  # fmt: skip
"""Options of ``subprocess.Popen`` that a fork server has no other choice of."""


DIES_WITH_PARENT = "die_with_parent"
"""Name of the only ``preexec_fn`` that a fork server knows: that of `keepstep run`."""


def _request(how: Mapping[str, Any]) -> tuple[ForkServer, Request] | None:
    """The request for a process that ``subprocess.Popen`` is to start, or None if it starts as ever."""
    dies_with_parent = _own is not None and getattr(how["preexec_fn"], "__name__", "") == DIES_WITH_PARENT
    options = {**how, "preexec_fn": None} if dies_with_parent else how
    if any(options[one] != usual for one, usual in USUAL.items()) or isinstance(how["args"], (str, bytes, os.PathLike)):
        return None
    given = os.environ if how["env"] is None else how["env"]
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
    folder = os.fsdecode(how["cwd"] or Path.cwd())
    arguments = [os.fsdecode(one) for one in how["args"]]
    namespace = ""
    if arguments[:3] == ["ip", "netns", "exec"]:
        namespace, *arguments = arguments[3:]
    serves = environment.pop(FORKS, "") != ""
    if (serves or _own is not None) and arguments[1:2] == ["-u"]:
        del arguments[1]
        environment["PYTHONUNBUFFERED"] = "1"
    serves = serves and arguments[:2] == [sys.executable, "-m"]
    server = SERVERS["scripts"] if serves else server_of(arguments)
    if server is SERVERS["workers"]:
        del arguments[1]  # execnet flushes what it writes
    if server is None or not same_python(environment) or not Path(folder).is_dir():
        return None
    return server, Request(
        arguments=arguments[1:],
        environment=environment,
        folder=folder,
        namespace=namespace,
        new_session=how["start_new_session"],
        group=how["process_group"],
        dies_with=os.getpid() if dies_with_parent else 0,
        serves="scripts" if server is SERVERS["workers"] else "all" if serves else "",
    )


def same_python(environment: Mapping[str, str]) -> bool:
    """Whether Python would start the same way in this environment. The servers have that of the tests."""
    names = {one for one in (*environment, *os.environ) if one.startswith("PYTHON")} - {"PYTHONUNBUFFERED"}
    return all(environment.get(one) == os.environ.get(one) for one in names)


UsualPopen = subprocess.Popen


class ForkedPopen(UsualPopen[Any]):
    """``subprocess.Popen``, but through a fork server where one has what the command imports."""

    def _execute_child(self, *given: Any) -> None:
        how = _EXECUTE.bind(self, *given).arguments
        request = _request(how)
        if request is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        server, asked = request
        pipes = [how[one] for one in ("p2cread", "c2pwrite", "errwrite")]
        try:
            self.pid = server.spawn(asked, [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)])
            self._child_created = True
        finally:
            self._close_pipe_fds(*(how[one] for one in PIPES))  # type: ignore[attr-defined]


def install(own: bytes = b"") -> None:
    """Start processes through fork servers from here on. They become children of this process, the subreaper.

    Args:
        own: address of the only server to use. Empty: start servers when needed.
    """
    global _own
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    for module in tuple(sys.modules.values()):  # torchrun has imported it by its name
        if getattr(module, "__dict__", {}).get("Popen") is UsualPopen:
            module.Popen = ForkedPopen  # type: ignore[attr-defined]
    if own:
        _own = ForkServer(address=own)


def installed() -> bool:
    return subprocess.Popen is ForkedPopen


def close() -> None:
    """End the fork servers."""
    for server in SERVERS.values():
        server.close()


def server_pids() -> set[int]:
    """Processes that tests share and do not end."""
    return {server.pid for server in SERVERS.values() if server.pid}
