"""One rank of a replica group as a process: its environment (torchrun's names), its start, its end."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from keepstep_mesh.security.tls import TlsFiles

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What all ranks of all groups share."""

    command: tuple[str, ...]
    replicas: int
    nproc_per_replica: int
    lighthouse: str
    job: str
    run_id: str
    max_restarts: int
    token_file: Path | None = None
    """Beats what the environment says."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    first_group: int = 0
    """Number of the first group started here, where one job is started on several machines."""
    replicas_in_job: int | None = None
    """Groups of the whole job; None: all are started here."""
    names: Path | None = None
    """Folder where each group leaves the name that it has at the lighthouse, in a file of the name that it has here."""


def group_name(job: JobSpec, group: int) -> str:
    """``r0``: what the group is called here, and at the lighthouse unless its script says otherwise."""
    return f"r{job.first_group + group}"


def command_line(program: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A Python file is run with this Python, unbuffered; anything else as it stands."""
    if program.endswith(".py"):
        return (sys.executable, "-u", program, *arguments)
    return (program, *arguments)


def program_problem(program: str) -> str | None:
    """Why ``program`` cannot be run, as a sentence; None if it can."""
    path = Path(program)
    if program.endswith(".py"):
        return None if path.is_file() else f"there is no file {program}; the current folder is {Path.cwd()}"
    if "/" not in program:
        if shutil.which(program) is not None:
            return None
        here = f"; write ./{program} for the one in the current folder" if path.is_file() else ""
        return f"there is no program {program} on the PATH{here}"
    if not path.exists():
        return f"there is no file {program}; the current folder is {Path.cwd()}"
    if path.is_dir():
        return f"{program} is a folder, not a program"
    if not os.access(path, os.X_OK):
        return f"{program} may not be executed; make it executable (chmod +x), or name what runs it: python {program}"
    return None


def free_port(port: int = 0) -> int:
    """``port`` if it is free, else OSError; 0: any. It may be taken by the time that it is used."""
    with socket.create_server(("127.0.0.1", port)) as server:
        found: int = server.getsockname()[1]
        return found


def rank_environment(
    job: JobSpec, group: int, local_rank: int, *, restart: int, master_port: int, base: Mapping[str, str]
) -> dict[str, str]:
    """``base`` with what torchrun sets for one node of its own and with what keepstep's Manager reads."""
    size = str(job.nproc_per_replica)
    number = job.first_group + group
    environment = dict(base)
    environment |= {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": str(local_rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "REPLICA_GROUP_ID": str(number),
        "NUM_REPLICA_GROUPS": str(job.replicas_in_job or job.replicas),
        "KEEPSTEP_LIGHTHOUSE": job.lighthouse,
        "KEEPSTEP_JOB": job.job,
    }
    # Python programs that are started by another name: what they print is shown when they print it.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.pop("KEEPSTEP_NAME_FILE", None)
    if job.names is not None:
        environment["KEEPSTEP_NAME_FILE"] = str(job.names / group_name(job, group))
    if job.token_file is not None:
        # The file, not what is in it: the ranks read it again when it changes.
        environment.pop("KEEPSTEP_TOKEN", None)
        environment["KEEPSTEP_TOKEN_FILE"] = str(job.token_file.absolute())
    for name in ("cert", "key", "ca"):
        if (file := getattr(job.tls, name)) is not None:
            environment[f"KEEPSTEP_TLS_{name.upper()}"] = str(file.absolute())
    ranks_here = job.replicas * job.nproc_per_replica
    if ranks_here > 1:
        # Each rank would otherwise start a thread for every core, and they would fight over them.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks_here)))
    return environment


class RankProcess:
    """A child in a session of its own (a terminal's Ctrl-C reaches only us) that the kernel kills when we die."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """OSError when it cannot be started. Main thread only: the kernel watches the thread that forked."""
        parent = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)

        def die_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

        self._popen = subprocess.Popen(  # noqa: S603 - running the user's command is what we are for
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - no thread of ours locks
        )
        self.pid = self._popen.pid
        self._exited = asyncio.Event()
        self._transports: list[asyncio.ReadTransport] = []

    async def output(self) -> tuple[asyncio.StreamReader, asyncio.StreamReader]:
        """Its standard output and standard error. Once."""
        loop = asyncio.get_running_loop()
        readers = []
        for pipe in (self._popen.stdout, self._popen.stderr):
            reader = asyncio.StreamReader()
            transport, _ = await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), pipe)
            self._transports.append(transport)
            readers.append(reader)
        return readers[0], readers[1]

    def look(self) -> None:
        """To be called at SIGCHLD. Notices its end and kills what it left in its session (data loaders, mostly)."""
        if self._exited.is_set() or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self._kill_session()  # before it is reaped: until then its number cannot be another's
        self._popen.wait()
        self._exited.set()

    async def wait(self) -> int:
        """Its exit code, negative for a signal, the moment it is gone, whoever else still holds its pipes."""
        self.look()
        await self._exited.wait()
        return self._popen.wait()

    def send(self, signum: int) -> None:
        """SIGKILL goes to its whole session; other signals to it alone: it ends its own helpers."""
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
        """Closes the pipes."""
        for transport in self._transports:
            transport.close()
