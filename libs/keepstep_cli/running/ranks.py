"""Run one rank of a replica group as a process: its environment (torchrun's names), its start, its end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, cast

from keepstep_cli.running import gpus
from keepstep_mesh.security.tls import TlsFiles

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Settings of all ranks of all groups."""

    command: tuple[str, ...]
    replicas: int
    nproc_per_replica: int
    lighthouse: str
    job: str
    run_id: str
    max_restarts: int
    token_file: Path | None = None
    """Overrides the environment."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    first_group: int = 0
    """Number of the first group on this machine, for a job on several machines."""
    replicas_in_job: int | None = None
    """Number of groups of the whole job; None: all run on this machine."""
    names: Path | None = None
    """Folder in which each group writes its incarnation, to a file with its local name."""
    imports: Path | None = None
    """Folder in which ranks write what they have imported."""
    spares: int = 0
    """Groups that are started here in addition to ``replicas``."""
    spares_in_job: int = 0
    notice: float = 0.0
    """Seconds from SIGTERM in which a spare may take the place of a group."""
    gpus: tuple[str, ...] = ()
    """``CUDA_VISIBLE_DEVICES`` of each group; empty: not set."""
    checks: tuple[str, ...] = ()
    """Of each machine before its group joins (``PreflightSettings``); empty: those of the environment."""
    nnodes: int = 1
    """Machines of each group."""
    node_rank: int = 0
    """Number of this machine in its group."""
    master: tuple[str, int] | None = None
    """Host of rank 0, and its port for the store of the ranks; None: this machine, at a free port."""


def group_name(job: JobSpec, group: int) -> str:
    """Return ``r0``, the local name of the group, and its name at the lighthouse unless its script sets another."""
    return f"r{job.first_group + group}"


def command_line(program: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command: this Python for a Python file, unbuffered; otherwise the program itself."""
    if program.endswith(".py"):
        return (sys.executable, "-u", program, *arguments)
    return (program, *arguments)


def program_problem(program: str) -> str | None:
    """Return a sentence about why ``program`` cannot run; None if it can."""
    path = Path(program)
    if program.endswith(".py"):
        return None if path.is_file() else f"file {program} not found; the current folder is {Path.cwd()}"
    if "/" not in program:
        if shutil.which(program) is not None:
            return None
        here = f"; write ./{program} for the file in the current folder" if path.is_file() else ""
        return f"program {program} not found on the PATH{here}"
    if not path.exists():
        return f"file {program} not found; the current folder is {Path.cwd()}"
    if path.is_dir():
        return f"{program} is a folder, not a program"
    if not os.access(path, os.X_OK):
        return f"{program} may not be executed; make it executable (chmod +x), or name what runs it: python {program}"
    return None


def free_port(port: int = 0) -> int:
    """Return ``port`` if it is free (0: any free port), else raise OSError. It may be in use again later."""
    with socket.create_server(("127.0.0.1", port)) as server:
        found: int = server.getsockname()[1]
        return found


def rank_environment(
    job: JobSpec, group: int, local_rank: int, *, restart: int, master_port: int, base: Mapping[str, str]
) -> dict[str, str]:
    """Return ``base`` with torchrun's variables, and with those of keepstep's Manager."""
    rank, size = str(job.node_rank * job.nproc_per_replica + local_rank), str(job.nnodes * job.nproc_per_replica)
    number, (master_addr, master_port) = job.first_group + group, job.master or ("127.0.0.1", master_port)
    environment = dict(base)
    environment |= {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(job.nproc_per_replica),
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": str(job.node_rank),
        "GROUP_WORLD_SIZE": str(job.nnodes),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "REPLICA_GROUP_ID": str(number),
        "NUM_REPLICA_GROUPS": str((job.replicas_in_job or job.replicas) + job.spares_in_job),
        "KEEPSTEP_LIGHTHOUSE": job.lighthouse,
        "KEEPSTEP_JOB": job.job,
    }
    # for Python programs with another name: show their output at once
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.pop("KEEPSTEP_NAME_FILE", None)
    environment.pop("KEEPSTEP_IMPORTS", None)
    environment["KEEPSTEP_SPARES"] = str(job.spares_in_job)
    if job.notice:
        environment["KEEPSTEP_NOTICE_SEC"] = str(job.notice)
    if job.checks:
        environment["KEEPSTEP_PREFLIGHT"] = "\n".join(job.checks)
    if job.names is not None:
        environment["KEEPSTEP_NAME_FILE"] = str(job.names / group_name(job, group))
    if job.imports is not None:
        environment["KEEPSTEP_IMPORTS"] = str(job.imports)
    if job.token_file is not None:
        # The file and not its content: ranks read it again when it changes.
        environment.pop("KEEPSTEP_TOKEN", None)
        environment["KEEPSTEP_TOKEN_FILE"] = str(job.token_file.absolute())
    if job.gpus:
        environment[gpus.variable_of(environment)] = job.gpus[group]
    for name in ("cert", "key", "ca"):
        if (file := getattr(job.tls, name)) is not None:
            environment[f"KEEPSTEP_TLS_{name.upper()}"] = str(file.absolute())
    ranks_here = job.replicas * job.nproc_per_replica
    if ranks_here > 1:
        # Otherwise each rank starts a thread for every core, and they compete for the cores.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks_here)))
    return environment


class Child(NamedTuple):
    """A child of this process: the leader of a session, with pipes for its output, that is killed if this one dies."""

    pid: int
    output: IO[bytes]
    errors: IO[bytes]
    reap: Callable[[], int]
    """Wait for its end, and return its exit code; negative for a signal. Called once."""


def started(command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> Child:
    """Start a program. Call it on the main thread: the kernel watches the thread that forked.

    Args:
        command, environment: of the program.
        pass_fds: descriptors that it inherits.

    Raises:
        OSError: it cannot be started.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    popen = subprocess.Popen(  # noqa: S603 - running the user's command is what we are for
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=pass_fds,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - no thread of ours locks
    )
    return Child(popen.pid, cast("IO[bytes]", popen.stdout), cast("IO[bytes]", popen.stderr), popen.wait)


class RankProcess:
    """A child in its own session, so that Ctrl-C reaches only the parent."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid
        self._code = 0
        self._exited = asyncio.Event()
        self._transports: list[asyncio.ReadTransport] = []

    async def output(self) -> tuple[asyncio.StreamReader, asyncio.StreamReader]:
        """Return its standard output and standard error. Call it once."""
        loop = asyncio.get_running_loop()
        readers = []
        for pipe in (self._child.output, self._child.errors):
            reader = asyncio.StreamReader()
            transport, _ = await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), pipe)
            self._transports.append(transport)
            readers.append(reader)
        return readers[0], readers[1]

    def look(self) -> None:
        """Notice its end and kill the rest of its session (mostly data loaders). Call it on SIGCHLD."""
        if self._exited.is_set() or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self._kill_session()  # before it is reaped, so that its pid cannot be reused
        self._code = self._child.reap()
        self._exited.set()

    async def wait(self) -> int:
        """Return its exit code (negative for a signal) when it has ended, even if another process holds its pipes."""
        self.look()
        await self._exited.wait()
        return self._code

    def send(self, signum: int) -> None:
        """Send SIGKILL to its whole session, and other signals only to it, because it ends its own helpers."""
        if self._exited.is_set():
            return
        if signum == signal.SIGKILL:
            self._kill_session()
        else:
            os.kill(self.pid, signum)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes."""
        for transport in self._transports:
            transport.close()
