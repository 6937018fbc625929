"""Runs inside the template process: import what ranks import, then fork a process for each of their starts.

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
import importlib
import importlib._bootstrap_external as loaders  # type: ignore[import-not-found, unused-ignore]
import itertools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any, NoReturn, TypedDict

VARIABLE = "KEEPSTEP_TEMPLATE"
"""Descriptor of the template's socket. No rank has this variable."""
LENGTH_BYTES = 8
GO = b"g"
STANDARD = 3
"""Descriptors of a start: standard output, standard error, and the pipe that lets it go."""
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
NAME = b"keepstep-warm"
NEXT_FORK_SECONDS = 2.0
"""Time after a start in which the next rank is forked only if it is needed: the first one needs the processor."""
FORK_AGAIN_SECONDS = 0.1
"""Delay before the next fork after one that failed."""
FORK_AWARE = (b"jemalloc_bg_thd",)
"""Threads of libraries that go on without them after a fork. pyarrow starts this one."""
MOST_DRAWN = 2000
"""Random numbers that an import may draw."""
THREAD_END_WAIT_SECONDS = 0.5
"""Time in which a thread that an import started may end by itself."""
REST = 1.0
"""Seconds of rest for each second of processor time, while other processes wait for a processor too."""
CANNOT_START = 71
"""Exit code (EX_OSERR): a script that fails ends with 1."""
TRACERS = ("coverage", "pydevd", "debugpy", "viztracer")


class Orders(TypedDict):
    """Modules to import, and facts of the ranks."""

    modules: list[list[str]]
    """Name, and origin of its spec in the process that was learned from; empty: any."""
    learned: list[str]
    """All modules of that process. Empty: it is not known."""
    excluded: list[str]
    """Modules that must not be imported here."""
    script: str
    """Path of the script; empty: started with ``-m``."""
    python_path: str | None
    """``PYTHONPATH`` of ranks."""
    supervisor: int
    """Its pid."""


class Start(TypedDict):
    environment: dict[str, str]


class Report(TypedDict, total=False):
    """Facts of the imports; or, with ``problem``, why nothing may be forked from here."""

    read: list[str]
    """Environment variables that were read. ``X_*``: those that begin with ``X_``."""
    set: list[str]
    """Environment variables that were set or removed."""
    files: list[list[Any]]
    """Path, mtime in ns and size of each source file outside installations."""
    failed: list[str]
    """Modules that cannot be imported, with the error."""
    modules: int
    problem: str
    chain: list[str]
    """The module that causes the problem, last, and those that import it."""
    final: bool
    """A template with less modules has the same problem."""


def serve(folder: str, loaded: set[str]) -> bool:
    """Return in each rank, before its script runs: whether it imported another ``sitecustomize``.

    Args:
        folder: that of this ``sitecustomize``.
        loaded: names of the modules that each Python with this environment has at this point.
    """
    connection = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
    connection.set_inheritable(False)
    orders: Orders = received(connection)[0]
    os.environ.pop("PYTHONPATH")
    if orders["python_path"] is not None:
        os.environ["PYTHONPATH"] = orders["python_path"]
    sys.path[:] = [one for one in sys.path if one != folder]
    libc = ctypes.CDLL(None, use_errno=True)
    usual_name = _comm()
    libc.prctl(PR_SET_NAME, NAME, 0, 0, 0)
    found = _next_sitecustomize()
    if (tracer := _tracer()) is not None:
        send(connection, Report(problem=tracer, chain=[], final=True))
        os._exit(0)
    own = set(sys.modules) - loaded - set(orders["learned"])
    preload = Preload(connection, orders)
    report = preload.run()
    if orders["learned"]:
        for name in own:
            del sys.modules[name]
    gc.collect()
    send(connection, report)
    start, files = _forked_start(connection)
    connection.close()
    _become(start, files, orders["supervisor"], libc, {one: preload.after.get(one) for one in report["set"]})
    libc.prctl(PR_SET_NAME, usual_name, 0, 0, 0)
    return found


def _comm(thread: str = "") -> bytes:
    try:
        with open(f"/proc/self/{thread}/comm", "rb") as file:
            return file.read().strip()
    except OSError:
        return b""


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


# ---- imports


class Environment(os._Environ):  # type: ignore[type-arg]
    """``os.environ`` during the imports: notes what is read.

    A module that goes through all variables looks for those that begin with its name (tqdm, fsspec).
    """

    def __getitem__(self, key: str) -> str:
        if key in _passed and _reader() is _passed[key]:
            del _passed[key]
        else:
            READ.add(key)
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> Iterator[str]:
        reader = _reader()
        READ.add(f"{reader.f_globals['__name__'].partition('.')[0].upper()}_*")
        keys = list(super().__iter__())
        _passed.update(dict.fromkeys(keys, reader))
        return iter(keys)


def _reader() -> Any:
    """Return the frame that uses ``os.environ``."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"] in ("collections.abc", "_collections_abc", "os"):
        frame = frame.f_back
    return frame


_passed: dict[str, Any] = {}
"""Variables that the frame goes through, and has not yet read."""
READ: set[str] = set()
Held = tuple[frozenset[str], frozenset[bytes], frozenset[str]]
"""Threads, children and descriptors of this process."""


class Preload:
    """Imports modules, and ends this process with a report if one of them leaves what no fork may copy."""

    def __init__(self, connection: socket.socket, orders: Orders) -> None:
        self._connection = connection
        self._orders = orders
        self._excluded = frozenset(orders["excluded"])
        self._chain: list[str] = []
        """Modules that are being imported, each by the one before."""
        self._files: list[list[Any]] = []
        self._seeds = Seeds()
        self._given_way = 0.0
        self._waited = _waited_seconds()
        self.after: dict[str, str] = {}
        """Environment after the imports."""

    def run(self) -> Report:
        before = dict(os.environ)
        main, script = sys.modules["__main__"], self._orders["script"]
        first = os.path.dirname(os.path.realpath(script)) if script else os.getcwd()
        if not sys.flags.safe_path:
            sys.path.insert(0, first)
        if script:
            main.__file__ = os.path.abspath(script)  # as Python sets it
        usual = os.sched_getscheduler(0), os.sched_getparam(0)
        if usual[0] == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.environ.__class__ = Environment
        restore = [*self._wrapped(loaders.SourceFileLoader, "exec_module", True)]
        restore += self._wrapped(loaders.ExtensionFileLoader, "create_module", False)
        restore += self._wrapped(loaders.ExtensionFileLoader, "exec_module", True)
        try:
            failed = self._import_all()
        finally:
            for one in restore:
                one()
            os.environ.__class__ = os._Environ
            _passed.clear()
            if usual[0] == os.SCHED_OTHER:
                os.sched_setscheduler(0, *usual)
            if script:
                del main.__file__
            if not sys.flags.safe_path:
                sys.path.remove(first)
        self._check_origins()
        self._check_devices()
        self.after = dict(os.environ)
        return Report(
            read=sorted(READ),
            set=sorted(one for one in before.keys() | self.after.keys() if before.get(one) != self.after.get(one)),
            files=self._files,
            failed=failed,
            modules=len(sys.modules),
        )

    def _import_all(self) -> list[str]:
        failed = []
        for name, _ in self._orders["modules"]:
            parents = list(itertools.accumulate(name.split("."), lambda above, own: f"{above}.{own}"))
            if name in sys.modules or not self._excluded.isdisjoint(parents):
                continue
            self._chain, self._seeds = [name], Seeds()
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - one that a script handles; the others go on
                failed.append(f"{name} ({type(error).__name__}: {error})"[:200])
            if self._seeds.changed():
                self._end("seeds random numbers when it is imported")
        self._chain = []
        return failed

    def _wrapped(self, loader: Any, method: str, executes: bool) -> Iterator[Callable[[], None]]:
        """Watch a method of a loader. Yield what undoes it."""
        inherited, usual = method not in vars(loader), getattr(loader, method)

        def watched(own: Any, module: Any) -> Any:
            name = module.__name__ if executes else module.name
            path = getattr(own, "path", "")
            self._chain.append(name)
            if name in self._excluded:
                self._end("must not be imported before the fork")
            if executes and not _is_installed(path):
                self._note_file(path)
            held = _held()
            try:
                return usual(own, module)
            finally:
                if name in ("random", "numpy.random", "torch"):
                    self._seeds = Seeds()
                self._check(held)
                self._give_way()
                self._chain.pop()

        setattr(loader, method, watched)
        yield lambda: delattr(loader, method) if inherited else setattr(loader, method, usual)

    def _note_file(self, path: str) -> None:
        try:
            facts = os.stat(path)
        except OSError:
            return
        self._files.append([path, facts.st_mtime_ns, facts.st_size])

    def _check(self, before: Held) -> None:
        if (after := _held()) == before:
            return
        gc.collect()  # of a file that nothing refers to any more
        if len(after[0]) > max(1, len(before[0])):
            after = _settled()
        if len(after[0]) > max(1, len(before[0])):
            self._end("starts a thread when it is imported")
        if after[1] - before[1]:
            self._end("starts a process when it is imported")
        for descriptor in sorted(_held()[2] - before[2]):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                self._end("uses a GPU when it is imported")
            self._end(f"leaves {'a socket' if target.startswith('socket:') else target} open when it is imported")

    def _check_origins(self) -> None:
        """Refuse modules that a script imports from elsewhere: it changes ``sys.path`` before."""
        for name, origin in self._orders["modules"]:
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if origin and spec is not None and spec.origin != origin:
                self._chain = [name]
                self._end(f"is found at {spec.origin}, and the script imports {origin}", final=True)

    def _check_devices(self) -> None:
        """Refuse a state of torch that no fork may copy. An import without a descriptor causes it, so has no name."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        devices = [one for name in ("cuda", "xpu", "mtia") if (one := sys.modules.get(f"torch.{name}")) is not None]
        if any(one.is_initialized() for one in devices if hasattr(one, "is_initialized")):
            self._end("an import initializes a GPU", final=True)
        probe = os.fork()
        if probe == 0:
            try:
                os._exit(any(one._is_in_bad_fork() for one in devices if hasattr(one, "_is_in_bad_fork")))
            except BaseException:  # noqa: BLE001 - it counts as bad
                os._exit(1)
        if os.waitpid(probe, 0)[1]:
            self._end("an import initializes a GPU so that no forked process can use it", final=True)

    def _end(self, problem: str, *, final: bool = False) -> NoReturn:
        send(self._connection, Report(problem=problem, chain=list(self._chain), final=final))
        os._exit(0)

    def _give_way(self) -> None:
        """Rest while other processes wait for a processor as this one does."""
        used, waited = time.process_time(), _waited_seconds()
        spent = used - self._given_way
        if spent < 0.005:
            return
        if waited - self._waited > spent / 10:
            time.sleep(REST * spent)  # leaves the processors to the ranks that train
        self._given_way, self._waited = used, waited


def _waited_seconds() -> float:
    """Return the time for which this process was ready to run, and another one ran."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _held() -> Held:
    """Return the threads, children and descriptors of this process."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            children = frozenset(file.read().split())
    except OSError:
        children = frozenset[bytes]()
    threads, opened = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    if len(threads) > 1:
        threads = [one for one in threads if _comm(f"task/{one}") not in FORK_AWARE]
    return frozenset(threads), children, frozenset(filter(_is_open, opened))  # not the one that lists them


def _is_open(descriptor: str) -> bool:
    try:
        os.get_inheritable(int(descriptor))
    except OSError:
        return False
    return True


class Seeds:
    """Seeds of the generators of random numbers that all modules share. Each rank gets others (``_renew_state``)."""

    def __init__(self) -> None:
        loaded: list[Any] = [sys.modules.get(name) for name in ("random", "numpy.random", "torch")]
        python, numpy, torch = loaded
        self._python = python.getstate() if hasattr(python, "getstate") else None  # it may be half imported
        self._numpy = numpy.get_state() if hasattr(numpy, "get_state") else None
        self._torch = torch.initial_seed() if hasattr(torch, "initial_seed") else None

    def changed(self) -> bool:
        """Whether one of them has another seed now. Numbers that were only drawn do not count (rich draws some)."""
        python: Any = sys.modules.get("random")
        numpy: Any = sys.modules.get("numpy.random")
        if self._python is not None and (words := python.getstate()[1][:-1]) != self._python[1][:-1]:
            own = python.Random()
            own.setstate(self._python)
            if not _reaches(words, lambda: own.getstate()[1][:-1], own.random):
                return True
        if self._numpy is not None and (key := numpy.get_state()[1].tobytes()) != self._numpy[1].tobytes():
            other = numpy.RandomState()
            other.set_state(self._numpy)
            if not _reaches(key, lambda: other.get_state()[1].tobytes(), other.random_sample):  # noqa: PLW0108
                return True
        return self._torch is not None and bool(sys.modules["torch"].initial_seed() != self._torch)


def _reaches(state: object, own: Callable[[], object], draw: Callable[[], object]) -> bool:
    """Whether a generator comes to ``state`` when it draws."""
    for _ in range(MOST_DRAWN):
        if own() == state:
            return True
        draw()
    return False


def _settled() -> Held:
    """Return ``_held`` after a fork, which ends the threads of libraries that know forks, such as OpenBLAS."""
    probe = os.fork()
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    until = time.monotonic() + THREAD_END_WAIT_SECONDS
    while len((held := _held())[0]) > 1 and time.monotonic() < until:
        time.sleep(0.01)  # the end of a thread signals nothing
    return held


def _is_installed(path: str) -> bool:
    return "/site-packages/" in path or "/dist-packages/" in path or path.startswith(_STANDARD)


_STANDARD = os.path.dirname(os.__file__) + "/"


# ---- forks


def _forked_start(connection: socket.socket) -> tuple[Start, list[int]]:
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
            return _taken_start(connection, adopted, take)
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


def _taken_start(connection: socket.socket, adopted: int, take: int) -> tuple[Start, list[int]]:
    """Wait for a start, in a rank that the supervisor has adopted."""
    if os.read(adopted, 1) != GO:  # the template ended
        os._exit(CANNOT_START)
    os.close(adopted)
    try:
        start, files = received(connection)
    except EOFError:
        os._exit(0)
    connection.sendall(os.getpid().to_bytes(LENGTH_BYTES))
    with contextlib.suppress(BrokenPipeError):  # the template ended
        os.write(take, GO)
    os.close(take)
    return start, files


def _become(start: Start, files: list[int], supervisor: int, libc: ctypes.CDLL, changed: dict[str, str | None]) -> None:
    """Set what a new process would have. Ends this process if the supervisor has given up the start."""
    output, errors, may_go = files
    if os.read(may_go, 1) != GO:
        os._exit(CANNOT_START)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the line above
        os._exit(CANNOT_START)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard, one in enumerate((nothing, output, errors)):
        os.dup2(one, standard)
    for one in (nothing, *files):
        os.close(one)
    os.environ.clear()
    os.environ.update(start["environment"])
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


# ---- messages


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
