"""What every test runs under: a test that leaves a task, thread, child process or socket behind fails.

Before each test it is noted what there is; after it (its fixtures torn down) whatever is new gets a few seconds to end,
awaited where it can be awaited, then fails the test by name and, where it can be, is ended so that later tests are not
blamed. What fixtures of a wider scope hold is there before and so is no leak. Leaked files are found by Python itself
(ResourceWarning is an error here); sockets and event descriptors are compared because native code opens them too.
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

if TYPE_CHECKING:
    from tests.support.services.etcd_server import EtcdCluster


LONGEST_FIRST = ("training", "faults", "browser", "services")
"""Folders whose files take longest. With the short files last, several pytest processes end at about the same time."""

GRACE_SECONDS = 5.0
"""For what was told to end and is still about it."""

PR_SET_CHILD_SUBREAPER = 36

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Children that Python starts once and keeps for the life of the process."""


# The machine may be busy: no test is timed by the clock on the wall.
hypothesis.settings.register_profile("keepstep", deadline=None)
hypothesis.settings.load_profile("keepstep")


def pytest_configure() -> None:
    """A grandchild whose parent died becomes our child, not init's: so an orphan is seen too.

    A shell starts what it runs in the background with SIGINT ignored, and nohup with SIGHUP, which every child would
    inherit. What is caught here is as usual again in a child.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def _threads() -> set[threading.Thread]:
    """Python threads. A dummy is a native one (torch's autograd pool) that once called into Python: not ours to end."""
    return {one for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}


def _children() -> dict[tuple[int, float], psutil.Process]:
    """Live children. A dead one that nobody waits for is an orphan that came to us: it is reaped here."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
            elif not any(name in " ".join(child.cmdline()) for name in HELPERS):
                found[child.pid, child.create_time()] = child
    return found


def _descriptors() -> dict[str, str]:
    """Open sockets, epolls and the like. Not pipes: libuv (torch's TCPStore, uvloop) opens a pair once and keeps it."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found[target] = f"{target} (descriptor {entry.name})"
            elif target.startswith("anon_inode:"):
                found[f"{entry} {target}"] = f"{target} (descriptor {entry.name})"
    return found


def _describe_sockets(leaked: dict[str, str]) -> list[str]:
    """Adds addresses to what is a socket of the internet kind."""
    ends = {
        f"(descriptor {one.fd})": f"{one.laddr} -> {one.raddr} {one.status}"
        for one in psutil.Process().net_connections(kind="inet")
    }
    return [f"{text} {ends.get(text[text.index('(') :], '')}".rstrip() for text in leaked.values()]


def _new_threads(before: set[threading.Thread], deadline: float) -> list[str]:
    for thread in _threads() - before:
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
            child.wait(GRACE_SECONDS)
    return told


def _new_descriptors(before: dict[str, str], deadline: float) -> list[str]:
    """Native threads close theirs a moment after they were told; nothing can be joined, so this looks again."""
    pause = 0.001
    while leaked := {key: text for key, text in _descriptors().items() if key not in before}:
        gc.collect()
        if time.monotonic() > deadline:
            return _describe_sockets(leaked)
        time.sleep(pause)
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
    """Async tests get the look at their tasks right after the other one: set up before, torn down after their own."""
    items.sort(key=_place)
    for item in items:
        names = getattr(item, "fixturenames", [])
        if nothing_is_left_behind.__name__ in names and _is_async(getattr(item, "obj", None)):
            names.insert(names.index(nothing_is_left_behind.__name__) + 1, no_task_is_left_behind.__name__)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails the test that leaks. First to be set up of all that have a test's scope, so last to be torn down."""
    threads, children, descriptors, handlers = _threads(), _children(), _descriptors(), _log_handlers()
    yield
    # Threads and children first: they hold descriptors.
    deadline = time.monotonic() + GRACE_SECONDS
    leaks = _new_threads(threads, deadline) + _new_children(children, deadline)
    leaks += _new_descriptors(descriptors, deadline if not leaks else 0.0) + _new_log_handlers(handlers)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest_asyncio.fixture
async def no_task_is_left_behind() -> AsyncIterator[None]:
    """The same for the tasks of an async test's loop."""
    before = asyncio.all_tasks()
    yield
    if new := asyncio.all_tasks() - before - {asyncio.current_task()}:
        _, pending = await asyncio.wait(new, timeout=GRACE_SECONDS)
        told = [f"task {one.get_name()}: {one.get_coro()!r}"[:300] for one in pending]
        for task in pending:
            task.cancel()
        if told:
            pytest.fail("the test left behind:\n  " + "\n  ".join(told), pytrace=False)


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
    """One real etcd for all tests; each uses a prefix of its own. A test that hurts etcd starts its own."""
    from keepstep_lighthouse.store.opening import open_store
    from tests.support.services.etcd_server import EtcdCluster

    async def warm_up() -> None:
        """What gRPC opens once in a process is no leak of the first test that uses it."""
        store = await open_store(f"{cluster.address}/warm-up")
        async with store.watch("") as _:
            await store.put("a", b"")
        await store.close()

    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        asyncio.run(warm_up())
        yield cluster
