"""Restart every process of a running mesh with another commit of keepstep, one after the other, and back.

make upgrade OLD=COMMIT                                    a commit of this repository
make upgrade UPGRADE="--old-tree ../keepstep-before"       a checkout, for a clone without history

Two lighthouses with an etcd, a relay, a metrics service and three groups run the old tree. Each is stopped with SIGTERM
and started from this tree, in the order of docs/operating.md. Then all go back in the opposite order. After each
restart all groups must commit steps together. A group of ``--refused-tree`` or ``--refused-commit``, which is too old,
must be refused with a sentence that names both versions.

Exit code: 1 if a step was lost, a process ended with an error, weights differ, or the history has a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp

from tests.support.jobs.job import Group, lost_steps
from tests.support.jobs.mesh import Mesh
from tests.support.network.ports import free_port
from tests.support.services.etcd_server import EtcdCluster

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 60.0
WAIT_SECONDS = 300.0
"""For a start, and for the steps after it: three trainers import torch on a machine that may be busy."""
LEASE_SECONDS = 10.0
"""A lighthouse that a busy machine stalls for less than this keeps its lease."""
STEPS_AFTER = 30
"""That all groups commit together after each restart."""
REFUSAL = "this lighthouse needs at least"
KINDS = ("relay", "metrics")


@dataclass(frozen=True)
class Tree:
    """A checkout. Its packages come before those of the environment."""

    name: str
    path: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join(str(self.path / one) for one in ("libs", "services", "."))}

    @property
    def trainer(self) -> list[str]:
        return [sys.executable, str(self.path / "tests" / "support" / "jobs" / "trainer.py")]


class Rolling:
    """The processes of a mesh, each of which runs one of the trees."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.groups: dict[str, Group] = {}
        self._services: dict[str, asyncio.subprocess.Process] = {}
        self._ports = {kind: free_port() for kind in KINDS}

    async def start_service(self, kind: str, tree: Tree) -> None:
        flags = ("--bind", f"127.0.0.1:{self._ports[kind]}", "--lighthouse", self.mesh.address, "--name", kind)
        with (self.mesh.directory / f"{kind}.log").open("ab") as log:
            self._services[kind] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "keepstep_cli", kind, *flags),
                env=environment(tree.environment),
                stdout=log,
                stderr=log,
            )
        await self._ready(kind)

    async def _ready(self, kind: str) -> None:
        """Wait until a service is back, as an operator does before the next restart."""
        process, url = self._services[kind], f"http://127.0.0.1:{self._ports[kind]}/readyz"
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS), aiohttp.ClientSession() as http:
                while process.returncode is None:
                    with suppress(aiohttp.ClientError):
                        async with http.get(url) as answer:
                            if answer.status == HTTPStatus.OK:
                                return
                    await asyncio.sleep(0.05)  # no event says so
        told = (self.mesh.directory / f"{kind}.log").read_text()
        raise AssertionError(f"{kind} is not ready; exit code {process.returncode}\n{told[-2000:]}")

    async def start_group(self, name: str, tree: Tree) -> None:
        self.groups[name] = await self.mesh.start(name, launcher=tree.trainer, **tree.environment)

    async def replace(self, what: str, tree: Tree) -> None:
        """Restart ``what`` from ``tree``, and wait until all groups train on."""
        began = time.time()
        if what.startswith("lighthouse-"):
            number = int(what.removeprefix("lighthouse-"))
            code = await self.mesh.stop_node(number, signal.SIGTERM)
            await self.mesh.restart_node(number, tree.environment)
            await self.mesh.leader(followed=True)
        elif what in self._services:
            code = await stopped(self._services[what])
            await self.start_service(what, tree)
        else:
            self.groups[what].kill(number=signal.SIGTERM)
            (code,) = await self.groups[what].exit_codes()
            await self.start_group(what, tree)
        if code:
            raise AssertionError(f"{what} ended with {code} on SIGTERM\n{self.mesh.report()}")
        await self.mesh.advance(steps=STEPS_AFTER, seconds=WAIT_SECONDS)
        lost = lost_steps(began, *self.groups.values())
        if lost:
            raise AssertionError(f"steps {lost} were lost when {what} moved to {tree.name}\n{self.mesh.report()}")
        print(f"{what:14} now runs {tree.name}; no step lost, {time.time() - began:.1f} s", flush=True)

    async def end(self) -> None:
        for process in self._services.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **variables}


async def stopped(process: asyncio.subprocess.Process) -> int:
    process.terminate()
    async with asyncio.timeout(STOP_SECONDS):
        return await process.wait()


@asynccontextmanager
async def rolling(etcd: EtcdCluster, tree: Tree) -> AsyncIterator[Rolling]:
    """Start a mesh from ``tree``."""
    async with Mesh(etcd, lease=LEASE_SECONDS, environment=tree.environment) as mesh:
        one = Rolling(mesh)
        try:
            for kind in KINDS:
                await one.start_service(kind, tree)
            for name in ("a", "b", "c"):
                await one.start_group(name, tree)
            await mesh.advance(steps=STEPS_AFTER, seconds=WAIT_SECONDS)
            yield one
        finally:
            await one.end()


async def play(old: Tree, new: Tree, refused: Tree | None) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-upgrade-")))
        etcd = stack.enter_context(EtcdCluster(folder / "etcd"))
        async with rolling(etcd, old) as mesh:
            order = [*KINDS, "lighthouse-1", "lighthouse-0", *mesh.groups]
            for what in order:
                await mesh.replace(what, new)
            if refused is not None:
                await check_refusal(mesh, refused)
            for what in reversed(order):
                await mesh.replace(what, old)
            compared = mesh.mesh.assert_identical()
    report = mesh.mesh.history
    assert report is not None
    print(f"weights identical ({compared:,} compared); no violation in the history")


async def check_refusal(mesh: Rolling, tree: Tree) -> None:
    """Let a group of ``tree`` ask, and require that it ends with a sentence that names both versions."""
    await mesh.start_group("too-old", tree)
    group = mesh.groups.pop("too-old")
    (code,) = await group.exit_codes()
    said = next((line for line in group.output if REFUSAL in line), "")
    if not code or not said:
        raise AssertionError(f"a group of {tree.name} ended with {code}, and was not refused\n{mesh.mesh.report()}")
    print(f"{tree.name} is refused: {said}", flush=True)
    del mesh.mesh.groups["too-old"]


def unpacked(commit: str, folder: Path) -> Tree:
    """Return a tree of ``commit``, without a change to the clone."""
    path = folder / commit
    path.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True, timeout=60).stdout
    subprocess.run(["tar", "-x", "-C", str(path)], input=archive, check=True, timeout=60)
    return Tree(commit, path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make upgrade", description=(__doc__ or "").split("\n", 1)[0])
    for which in ("old", "refused"):
        one = parser.add_mutually_exclusive_group(required=which == "old")
        one.add_argument(f"--{which}-tree", type=Path, metavar="PATH")
        one.add_argument(f"--{which}-commit", metavar="COMMIT")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keepstep-trees-") as folder:

        def tree(path: Path | None, commit: str | None) -> Tree | None:
            return Tree(path.name, path.resolve()) if path else unpacked(commit, Path(folder)) if commit else None

        old = tree(options.old_tree, options.old_commit)
        assert old is not None
        try:
            asyncio.run(play(old, Tree("this tree", ROOT), tree(options.refused_tree, options.refused_commit)))
        except AssertionError as broken:
            print(f"BROKEN: {broken}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
