"""Start the ranks of checks: as forks of a process that has done the imports, or as new processes of Python.

The imports of torch, keepstep and the checks take seconds for each rank, and a GPU is there for minutes. The process
that is forked, the template, has no threads and has not used CUDA. It is a fork of the runner, which has done these
imports too, or a new process if the runner has threads or has used CUDA. Where no template can be had, each rank is a
new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from tests.gpu.rank import Order, main

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import torch; from tests.gpu.rank import main; import sys; main(sys.argv[1])"
TEMPLATE = "import sys; from tests.gpu.starting import serve; serve(int(sys.argv[1]))"
IMPORTED_LATER = ("torch._dynamo", "keepstep.lifecycle.wiring")
"""Modules that the first optimizer and the first Manager of a process import."""
TEMPLATE_SECONDS = 60.0
"""Limit of its imports; ranks are new processes after that."""
FORK_SECONDS = 5.0
POLL_SECONDS = 0.02
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 1 << 16


class Process(Protocol):
    """A rank, as ``subprocess.Popen`` has it."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class Forked:
    """A rank that is a grandchild: this process, a subreaper, has adopted it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["rank"], timeout or 0.0)
            time.sleep(POLL_SECONDS)  # the kernel tells the end of one process only, and a check has several
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class Starter:
    """Starts ranks. ``template``: the connection to the process that is forked; None: each is a new process."""

    def __init__(self, template: socket.socket | None = None, process: Process | None = None) -> None:
        self._template, self._process = template, process
        self._lock = threading.Lock()
        self._ranks: list[Process] = []

    @property
    def forks(self) -> bool:
        """Whether ranks are forks."""
        return self._template is not None

    @classmethod
    def prepared(cls) -> Starter:
        """Start the process that is forked, and wait until it has done its imports.

        Call it before this process uses CUDA or starts threads: the process is a fork of it then.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        process = _new_template(theirs) if _unfit() else _forked_template(ours, theirs)
        theirs.close()
        ours.settimeout(TEMPLATE_SECONDS)
        starter = cls(ours, process)
        try:
            problem = ours.recv(MESSAGE_BYTES).decode() or "it ended"
        except TimeoutError:
            problem = f"its imports took more than {TEMPLATE_SECONDS:g} s"
        if problem != "ready":
            print(f"each rank is a new process: {problem}", flush=True)
            starter.close()
        else:
            ours.settimeout(FORK_SECONDS)
        return starter

    def start(self, order: Order, variables: dict[str, str], log: Path) -> Process:
        """Start a rank with a session of its own.

        Args:
            order: its part in a check.
            variables: of its environment, beside those of this process.
            log: file to which its output is appended.
        """
        text = json.dumps(asdict(order))
        with self._lock:
            if self._template is not None:
                try:
                    self._template.send(json.dumps([text, variables, str(log)]).encode())
                    rank = Forked(int(self._template.recv(MESSAGE_BYTES)))
                    self._ranks.append(rank)
                    return rank
                except (OSError, ValueError) as error:
                    print(f"each rank is a new process from now on: {error}", flush=True)
                    self._end()
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, text],
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._ranks.append(process)
        return process

    def close(self) -> None:
        """End the process that is forked, and ranks of checks that were interrupted."""
        with self._lock:
            self._end()
            for rank in self._ranks:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    if rank.poll() is None:
                        os.killpg(rank.pid, signal.SIGKILL)
                        rank.wait(FORK_SECONDS)
            self._ranks.clear()

    def _end(self) -> None:
        if self._template is not None and self._process is not None:
            self._template.close()
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._template = None


COLD = Starter()
"""Starts each rank as a new process."""


def _new_template(connection: socket.socket) -> Process:
    return subprocess.Popen(
        [sys.executable, "-c", TEMPLATE, str(connection.fileno())],
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # numpy starts its threads when it is imported
        pass_fds=[connection.fileno()],
    )


def _forked_template(ours: socket.socket, connection: socket.socket) -> Process:
    sys.stdout.flush()  # or each rank writes it again
    sys.stderr.flush()
    template = os.fork()
    if template:
        return Forked(template)
    code = 1
    try:
        ours.close()
        serve(connection.detach())
        code = 0
    except BaseException:  # noqa: BLE001  the runner's own code must not go on in this process
        traceback.print_exc()
    finally:
        os._exit(code)


def serve(descriptor: int) -> None:
    """Do the imports, then fork a rank for each message, until the other end closes. Runs in the template."""
    from tests.gpu import checks  # noqa: F401

    for name in IMPORTED_LATER:
        importlib.import_module(name)
    connection = socket.socket(fileno=descriptor)
    gc.collect()
    gc.freeze()
    connection.send(_unfit().encode() or b"ready")
    while message := connection.recv(MESSAGE_BYTES):
        order, variables, log = json.loads(message)
        told, tell = os.pipe()
        between = os.fork()
        if between:
            os.close(tell)
            pid = os.read(told, MESSAGE_BYTES)
            os.close(told)
            os.waitpid(between, 0)  # from here on the rank is a child of the runner
            connection.send(pid)
            continue
        rank = os.fork()
        if rank:
            os.write(tell, str(rank).encode())
            os._exit(0)
        for one in (told, tell, connection.detach()):
            os.close(one)
        _become(order, variables, log)


def _unfit() -> str:
    """Return why no fork of this process can use a GPU; empty: it can."""
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return "an import has started a thread"
    probe = os.fork()
    if probe == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return "an import has used CUDA" if os.waitpid(probe, 0)[1] else ""


def _become(order: str, variables: dict[str, str], log: str) -> NoReturn:
    """Run a rank in this fork."""
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.environ.update(variables)
        main(order)
        code = 0
    except BaseException:  # noqa: BLE001  the log has it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
