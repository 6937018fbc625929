"""Checks that apply to every test: a test that leaves a task, thread, child process, socket or log handler fails.

Before each test the check lists what exists. After the teardown of the test's fixtures, new threads, children and
sockets get a few seconds to end. Those that remain fail the test by name, and are ended where possible, so that they do
not fail later tests. Resources of fixtures with a wider scope exist before the test and are no leak. Python finds
leaked files (an error here); sockets and event descriptors are compared as native code opens them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest
import pytest_asyncio
import structlog

from keepstep_mesh.threads.starting import reserve_for_exit
from tests.support.processes import forked

if TYPE_CHECKING:
    from tests.support.services.etcd_server import EtcdCluster


LONGEST_FIRST = ("training", "faults", "browser", "services")
"""Folders whose files take longest. With the short files last, several pytest processes end at about the same time."""

GRACE_SECONDS = 20.0
"""Time that threads, children and sockets have to end after the test."""
KILLED_SECONDS = 30.0
"""Limit for the end of a child that was left behind and got SIGKILL."""

PR_SET_CHILD_SUBREAPER = 36

HELPERS = ("multiprocessing.resource_tracker",)
"""Children that Python starts once and keeps for the life of the process."""


# The import of all test modules makes millions of objects and no garbage: a fifth of its CPU time is saved.
# `pytest_collection_finish` enables it again.
gc.disable()

# The machine may be busy: no test has a limit in wall-clock time for an example.
hypothesis.settings.register_profile("keepstep", deadline=None)
hypothesis.settings.load_profile("keepstep")


def pytest_configure() -> None:
    """Adopt orphans, so that the leak check sees them, and handle SIGINT and SIGHUP.

    A shell starts background processes with SIGINT ignored, and nohup ignores SIGHUP; children would inherit that. A
    child does not inherit a handler: it starts with the default action.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reserve_for_exit()  # no test leaves these threads behind
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    forked.install()


def pytest_unconfigure() -> None:
    """End the fork servers."""
    forked.close()


def _threads() -> set[threading.Thread]:
    """Python threads, without dummies: native threads (torch's autograd pool) that once called into Python."""
    return {one for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}


def _children() -> dict[tuple[int, float], psutil.Process]:
    """Live children. An adopted orphan that has ended is reaped here, as nothing else waits for it."""
    found = {}
    for pid in _child_pids() - forked.server_pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            if child.status() == psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            elif not any(name in " ".join(child.cmdline()) for name in HELPERS):
                found[pid, child.create_time()] = child
    return found


def _child_pids() -> set[int]:
    """Children by the kernel's list of each thread: psutil reads the state of every process of the machine."""
    pids: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            pids.update(map(int, (thread / "children").read_text().split()))
    return pids


def _descriptors() -> dict[str, str]:
    """Open sockets and event descriptors. No pipes: libuv (torch's TCPStore, uvloop) opens a pair once and keeps it."""
    found = {}
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - twice as fast as Path, and called twice for each test
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
            if target.startswith("socket:"):
                found[target] = f"{target} (descriptor {number})"
            elif target.startswith("anon_inode:"):
                found[f"{number} {target}"] = f"{target} (descriptor {number})"
    return found


def _describe_sockets(leaked: dict[str, str]) -> list[str]:
    """Add the addresses of internet sockets."""
    ends = {
        f"(descriptor {one.fd})": f"{one.laddr} -> {one.raddr} {one.status}"
        for one in psutil.Process().net_connections(kind="inet")
    }
    return [f"{text} {ends.get(text[text.index('(') :], '')}".rstrip() for text in leaked.values()]


def _new_threads(before: set[threading.Thread], deadline: float) -> list[str]:
    for thread in _threads() - before:
        if thread._started.wait(max(0.0, deadline - time.monotonic())):  # it may be about to start
            thread.join(max(0.0, deadline - time.monotonic()))
    return [f"thread {one.name!r}" for one in _threads() - before]


def _new_children(before: dict[tuple[int, float], psutil.Process], deadline: float) -> list[str]:
    children = {key: child for key, child in _children().items() if key not in before}
    if not children:
        return []
    _, alive = psutil.wait_procs(children.values(), timeout=max(0.0, deadline - time.monotonic()))
    told = []
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            told.append(f"process {child.pid}: {' '.join(child.cmdline())[:200]}")
            child.send_signal(signal.SIGKILL)
            child.wait(KILLED_SECONDS)
    return told


def _new_descriptors(before: dict[str, str], deadline: float) -> list[str]:
    """Poll until the descriptors are closed: native threads close them a moment later, and cannot be joined."""
    pause = 0.001
    while leaked := {key: text for key, text in _descriptors().items() if key not in before}:
        gc.collect()
        if time.monotonic() > deadline:
            return _describe_sockets(leaked)
        time.sleep(pause)  # nothing signals the end of a native thread
        pause = min(pause * 2, 0.2)
    return []


def _log_handlers() -> set[logging.Handler]:
    """Handlers of the root logger, without those that pytest adds and removes around each phase of a test."""
    return {one for one in logging.getLogger().handlers if not type(one).__module__.startswith("_pytest.")}


def _new_log_handlers(before: set[logging.Handler]) -> list[str]:
    """A handler that outlives its test writes the log lines of all later tests to a stream that pytest closed."""
    new = _log_handlers() - before
    for handler in new:
        logging.getLogger().removeHandler(handler)
    return [f"log handler {one!r}" for one in new]


def _is_async(function: object) -> bool:
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    return inspect.iscoroutinefunction(inner)


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long folders first, and give async tests the check of tasks right after the check of everything else."""
    items.sort(key=_place)
    for item in items:
        names = getattr(item, "fixturenames", [])
        if nothing_is_left_behind.__name__ in names and _is_async(getattr(item, "obj", None)):
            names.insert(names.index(nothing_is_left_behind.__name__) + 1, no_task_is_left_behind.__name__)


def pytest_collection_finish() -> None:
    """Take the modules of torch out of garbage collection: to look at their objects takes 0.3 s of CPU time.

    Torch computes in one thread: processes of tests share the cores, and threads of OpenMP spin when they have no work.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the test that leaks. It is the first fixture with the scope of a test, so its teardown is the last."""
    threads, children, descriptors, handlers = _threads(), _children(), _descriptors(), _log_handlers()
    yield
    # Threads and children first: they hold descriptors, which get a time of their own.
    deadline = time.monotonic() + GRACE_SECONDS
    leaks = _new_threads(threads, deadline) + _new_children(children, deadline)
    deadline = 0.0 if leaks else time.monotonic() + GRACE_SECONDS
    leaks += _new_descriptors(descriptors, deadline) + _new_log_handlers(handlers)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest_asyncio.fixture
async def no_task_is_left_behind() -> AsyncIterator[None]:
    """Fail the async test that leaves a task in its loop."""
    before = asyncio.all_tasks()
    yield
    if new := asyncio.all_tasks() - before - {asyncio.current_task()}:
        _, pending = await asyncio.wait(new, timeout=GRACE_SECONDS)
        told = [f"task {one.get_name()}: {one.get_coro()!r}"[:300] for one in pending]
        for task in pending:
            task.cancel()
        if told:
            pytest.fail("the test left behind:\n  " + "\n  ".join(told), pytrace=False)


@pytest.fixture(scope="session")
def fork_server_of_scripts() -> None:
    """Wait for the fork server that has torch, so that a test with a service in its own event loop need not."""
    if forked.installed():
        forked.SERVERS["scripts"].wait()


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Undoes what the test configures with ``keepstep_mesh.config.logging.configure``."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the working tree."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One real etcd for all tests; each uses its own prefix. A test that damages etcd starts its own."""
    from keepstep_lighthouse.store.opening import open_store
    from tests.support.services.etcd_server import EtcdCluster

    async def warm_up() -> None:
        """Open what gRPC opens once in a process, so that the first test that uses it does not seem to leak it."""
        store = await open_store(f"{cluster.address}/warm-up")
        async with store.watch("") as _:
            await store.put("a", b"")
        await store.close()

    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        asyncio.run(warm_up())
        yield cluster
