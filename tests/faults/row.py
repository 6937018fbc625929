"""One row of the fault runs: a job that trains, a fault that is repeated, and the times that it costs.

Two lighthouses with their default limits share a real etcd; each group is a process that trains. After each fault all
groups that were not killed must commit ``STEPS_AFTER`` more steps. At the end no other trainer may have exited, weights
must be bit-identical, and ``check-history`` must find no violation in the logs.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.outcome import Limit, Outcome
from tests.support.jobs.job import Group
from tests.support.jobs.mesh import Mesh
from tests.support.network import namespaces
from tests.support.network.namespaces import Namespaces
from tests.support.services.etcd_server import EtcdCluster

LEASE = 10.0
"""The default of ``--lease``."""
HEARTBEAT_TIMEOUT = 5.0
"""The default of ``--heartbeat-timeout``."""
STEPS_AFTER = 100
TURN_SECONDS = 300.0
"""For one repetition."""


class Run:
    """A run of one row.

    Args:
        row: The row.
        times: Number of repetitions.
        proxies: Cut the network with TCP proxies even where network namespaces are available.
        say: Called with a line of progress per repetition.
        keep: Folder for the logs; None discards them.
    """

    def __init__(self, row: Row, times: int, *, proxies: bool, say: Callable[[str], None], keep: Path | None) -> None:
        self.outcome = Outcome(row.name, row.what, times, row.limit, row.holds)
        self._row = row
        self._proxies = proxies
        self._say = say
        self._keep = keep

    async def play(self) -> Outcome:
        """Run the row. An error in it is a broken promise in the outcome, never an exception."""
        began = time.monotonic()
        try:
            await self._row.play(self)
        except Exception as error:  # noqa: BLE001 - the other rows must run too
            first, *more = str(error).splitlines() or [""]
            self.outcome.broken.append(f"{type(error).__name__}: {first}")
            self._say("\n".join([*traceback.format_exception(error)[-2:], *more]))
        self.outcome.took = time.monotonic() - began
        self.outcome.judge()
        return self.outcome

    @asynccontextmanager
    async def mesh(
        self,
        *names: str,
        min_replicas: int = 1,
        nodes: int = 1,
        proxied: bool = False,
        flags: tuple[str, ...] = (),
        **trainer: str,
    ) -> AsyncIterator[tuple[Mesh, list[Group]]]:
        """Train with the groups ``names``.

        Args:
            names: Of the groups.
            min_replicas: ``--min-replicas`` of the lighthouses.
            nodes: Number of etcd nodes.
            proxied: The groups reach the lighthouses through proxies, whether or not the row cuts the network.
            flags: More flags of the lighthouses.
            trainer: Environment of ``trainer.py``.
        """
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-faults-")))
            network = stack.enter_context(Namespaces()) if self._row.cuts_network and not self._proxies else None
            if self._row.cuts_network:
                self.outcome.network = "network namespaces" if network else "TCP proxies"
            host = network.host("etcd") if network else namespaces.LOOPBACK
            etcd = stack.enter_context(EtcdCluster(folder / "etcd", nodes, host=host))
            self.etcd = etcd
            proxied = proxied or self._row.cuts_network
            mesh = Mesh(etcd, *flags, lease=LEASE, network=network, proxied=proxied, min_replicas=min_replicas)
            try:
                async with mesh:
                    try:
                        groups = [await mesh.start(name, **trainer) for name in names]
                        await mesh.advance(*groups)
                        yield mesh, groups
                        self.outcome.exited = gone(mesh)
                        self.outcome.compared = mesh.assert_identical()
                    except Exception:
                        self.outcome.exited = gone(mesh, but=-signal.SIGKILL)  # which the row may have sent
                        raise
                    finally:
                        self._keep_logs(mesh)
            finally:
                self.outcome.take(mesh.history)

    def _keep_logs(self, mesh: Mesh) -> None:
        if self._keep is not None:
            folder = self._keep / self._row.name
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(mesh.directory, folder)
            (folder / "report.txt").write_text(mesh.report())

    @property
    def turns(self) -> range:
        return range(self.outcome.wanted)

    @asynccontextmanager
    async def gap(self, mesh: Mesh, *groups: Group) -> AsyncIterator[None]:
        """Note how long the fault inside keeps these groups from committing."""
        since = time.time()
        async with asyncio.timeout(TURN_SECONDS):
            yield
            await mesh.advance(*groups, steps=STEPS_AFTER)
        self.note(max(group.longest_gap(since) for group in groups))

    def remark(self, text: str) -> None:
        """Print a figure that is in no column of the table."""
        self._say(f"  {self._row.name}: {text}")

    def note(self, seconds: float) -> None:
        self.outcome.seconds.append(seconds)
        self._say(f"  {self._row.name} {len(self.outcome.seconds)}/{self.outcome.wanted}: {seconds:.3f} s")


def gone(mesh: Mesh, but: int | None = None) -> list[str]:
    """Names of groups with a process that exited with another code than ``but``."""
    codes = {group.name: {one.exit_code for one in group.ranks} - {None, but} for group in mesh.groups.values()}
    return sorted(name for name, ended in codes.items() if ended)


@dataclass(frozen=True, slots=True)
class Row:
    """A fault, how often it is repeated, and what must hold.

    ``cuts_network``: hosts are cut off from each other, in network namespaces where possible and through TCP proxies
    elsewhere. ``namespaces_only``: proxies cannot do it.
    """

    name: str
    what: str
    times: int
    play: Callable[[Run], Awaitable[None]]
    limit: Limit | None = None
    holds: str = ""
    """The assertions of ``play`` beside those of every row."""
    cuts_network: bool = False
    namespaces_only: bool = False


def first_event_after(since: float, *groups: Group) -> float:
    return min(event["t"] for group in groups for event in group.lines if event["t"] > since)
