"""A Slurm of its own: slurmctld, and a slurmd for each node, all on this machine, in a temporary folder.

Nodes share one address. Slurm's own authentication is off, so it needs neither munge nor root.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import psutil

from tests.support.network.ports import free_ports
from tests.support.processes.forked import FORKS

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
SECONDS = 120.0
JOB_SECONDS = 120.0
"""For what jobs do."""
CONFIGURATION = """
ClusterName=keepstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=10
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return what is missing for a cluster; None: nothing."""
    missing = [one for one in PROGRAMS if shutil.which(one, path=_path()) is None]
    return f"Slurm is not installed: {', '.join(missing)} not found (Debian: slurmctld slurmd)" if missing else None


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"


class SlurmCluster:
    """An async context manager. Its end cancels all jobs, and ends all processes of the cluster."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self._nodes = nodes
        self._daemons: list[asyncio.subprocess.Process] = []
        self._configuration = folder / "slurm.conf"
        self._environment = {key: value for key, value in os.environ.items() if key != FORKS}  # Slurm starts them all
        self._environment |= {"SLURM_CONF": str(self._configuration), "PATH": _path()}

    async def __aenter__(self) -> Self:
        port, *ports = free_ports(1 + self._nodes)
        (self.folder / "state").mkdir()
        names = [f"n{number}" for number in range(self._nodes)]
        self._configuration.write_text(
            CONFIGURATION.format(
                host=socket.gethostname(),
                user=getpass.getuser(),
                folder=self.folder,
                last=self._nodes - 1,
                port=port,
                ports=",".join(map(str, ports)),
            )
        )
        try:
            await self._start("slurmctld", "-D", "-i")
            for name in names:
                (self.folder / name).mkdir()
                await self._start("slurmd", "-D", "-N", name)
            async with asyncio.timeout(SECONDS):
                while (await self.run("sinfo", "--noheader", "--format=%t %D")) != f"idle {self._nodes}\n":  # noqa: ASYNC110
                    await asyncio.sleep(0.1)  # no command waits for it
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            self._daemons.append(
                await asyncio.create_subprocess_exec(*command, env=self._environment, stdout=out, stderr=out)
            )

    async def run(self, *command: str, **variables: str) -> str:
        """Return what a command has printed that succeeds."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, env={**self._environment, **variables}, cwd=self.folder, stdout=pipe, stderr=pipe
        )
        try:
            async with asyncio.timeout(SECONDS):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, f"{command}: {errors.decode()}"
        return output.decode()

    async def submit(self, *words: str, **variables: str) -> str:
        """Start deploy/slurm/group.sbatch with options of sbatch, a script and its arguments; return its job."""
        return (await self.run("sbatch", "--parsable", "--oversubscribe", *words, **variables)).strip()

    def log(self, task: int) -> str:
        """Return what a task of the array has printed."""
        file = self.folder / f"keepstep-{task}.log"
        return file.read_text() if file.exists() else ""

    async def states(self, job: str) -> set[str]:
        """Return the states of a job: one, or those of all tasks of an array."""
        shown = await self.run("scontrol", "--oneliner", "show", "job", job)
        return {word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")}

    async def until_state(self, job: str, state: str) -> None:
        """Wait until a job, or each task of an array, has this state."""
        async with self._deadline(f"job {job} is {state}"):
            while await self.states(job) != {state}:  # noqa: ASYNC110  no command waits for it
                await asyncio.sleep(0.1)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for what the processes of jobs do."""
        async with self._deadline(what):
            while not condition():  # noqa: ASYNC110  other processes make it true
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(JOB_SECONDS):
                yield
        except TimeoutError:
            logs = "\n".join(f"--- {one.name}\n{one.read_text()[-3000:]}" for one in self.folder.glob("*.log"))
            raise AssertionError(f"not seen within {JOB_SECONDS:g} s: {what}\n{logs}") from None

    async def __aexit__(self, *_: object) -> None:
        for one in self._daemons:
            if one.returncode is None:
                one.kill()
            await one.wait()
        while left := [*self._processes()]:  # slurmstepd, and what it has started
            for one in left:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            await asyncio.to_thread(psutil.wait_procs, left, SECONDS)

    def _processes(self) -> Iterator[psutil.Process]:
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.environ().get("SLURM_CONF") == str(self._configuration):
                    yield one
