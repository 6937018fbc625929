"""Imports what ranks import, inside the template process. ``template_forks`` calls it.

Standard library only, and no other module of keepstep.
"""

from __future__ import annotations

import gc
import importlib
import importlib._bootstrap_external as loaders  # type: ignore[import-not-found, unused-ignore]
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypedDict

FORK_AWARE = (b"jemalloc_bg_thd",)
"""Threads of libraries that go on without them after a fork. pyarrow starts this one."""
MOST_DRAWN = 2000
"""Random numbers that an import may draw."""
THREAD_END_WAIT_SECONDS = 0.5
"""Time in which a thread that an import started may end by itself."""
REST = 1.0
"""Seconds of rest for each second of processor time, while other processes wait for a processor too."""


class Orders(TypedDict):
    """Modules to import, and facts of the ranks."""

    modules: list[list[str]]
    """Name, and origin of its spec in the process that was learned from; empty: any."""
    learned: list[str]
    """All modules of that process. Empty: it is not known."""
    excluded: list[str]
    """Modules that must not be imported here."""
    of_ranks: list[str]
    """Variables that do not have the same value in all ranks."""
    script: str
    """Path of the script; empty: started with ``-m``."""
    python_path: str | None
    """``PYTHONPATH`` of ranks."""
    supervisor: int
    """Its pid."""


class Report(TypedDict, total=False):
    """Facts of the imports; or, with ``problems``, why nothing may be forked from here."""

    read: list[str]
    """Environment variables that were read. ``X_*``: those that begin with ``X_``."""
    set: list[str]
    """Environment variables that were set or removed; with ``problems``: since torch was imported."""
    files: list[list[Any]]
    """Path, mtime in ns and size of the file of each module."""
    failed: list[str]
    """Modules that cannot be imported, with the error."""
    modules: int
    problems: list[tuple[str, list[str]]]
    """Each with the module that causes it, last, and those that import that one."""
    final: bool
    """A template with less modules has the same problem."""


class Environment(os._Environ):  # type: ignore[type-arg]
    """``os.environ`` during the imports: notes what is read.

    A module that goes through all variables looks for those that begin with its name (tqdm, fsspec).
    """

    read: Callable[[str], None]
    """Gets names, and beginnings of names followed by ``*``."""

    def __getitem__(self, key: str) -> str:
        if key in _passed and _reader() is _passed[key]:
            del _passed[key]
        else:
            Environment.read(key)
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> Iterator[str]:
        reader = _reader()
        Environment.read(f"{reader.f_globals['__name__'].partition('.')[0].upper()}_*")
        keys = list(super().__iter__())
        _passed.update(dict.fromkeys(keys, reader))
        return iter(keys)


def _environment() -> dict[bytes, bytes]:
    """Return ``os.environ``, without a note that it was read."""
    environ: Any = os.environ
    return dict(environ._data)


def _reader() -> Any:
    """Return the frame that uses ``os.environ``."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"] in ("collections.abc", "_collections_abc", "os"):
        frame = frame.f_back
    return frame


_passed: dict[str, Any] = {}
"""Variables that the frame goes through, and has not yet read."""
Held = tuple[frozenset[str], frozenset[bytes], frozenset[str]]
"""Threads, children and descriptors of this process."""


class Preload:
    """Imports modules, and ends this process with a report if one of them leaves what no fork may copy."""

    def __init__(self, orders: Orders, tell: Callable[[Report], None]) -> None:
        self._tell = tell
        self._orders = orders
        self._excluded = frozenset(orders["excluded"])
        self._read: set[str] = set()
        self._readers: dict[str, tuple[str, list[str]]] = {}
        """Modules that read a variable which differs between ranks: the problem, and the chain."""
        self._generators: list[Any] = []
        """Generators of random numbers that an import made, and that no import seeded."""
        self._chain: list[str] = []
        """Modules that are being imported, each by the one before."""
        self._files: list[list[Any]] = []
        self._seeds = Seeds()
        self._at_torch: dict[bytes, bytes] | None = None
        """Environment when torch had been imported."""
        self._given_way = 0.0
        self._waited = _waited_seconds()
        self.after: dict[str, str] = {}
        """Environment after the imports."""

    def of_site(self, load: Callable[[], bool]) -> bool:
        """Load the ``sitecustomize`` of the ranks with ``load``, and return its result."""
        self._chain, held = ["sitecustomize"], _held()
        Environment.read = self._note_read
        os.environ.__class__ = Environment
        try:
            return load()
        finally:
            os.environ.__class__ = os._Environ
            self._check(held)
            for one in list(sys.modules.values()):
                self._note_file(getattr(one, "__file__", None) or "")

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
        usual_seed, random.Random.seed = random.Random.seed, self._seed_noted(random.Random.seed)  # type: ignore[method-assign]
        try:
            failed = self._import_all()
        finally:
            for one in restore:
                one()
            random.Random.seed = usual_seed  # type: ignore[method-assign]
            os.environ.__class__ = os._Environ
            _passed.clear()
            if usual[0] == os.SCHED_OTHER:
                os.sched_setscheduler(0, *usual)
            if script:
                del main.__file__
            if not sys.flags.safe_path:
                sys.path.remove(first)
        if self._readers:
            late = self._set_since_torch()
            self._tell(Report(problems=list(self._readers.values()), final=False, set=late))
            os._exit(0)
        self._check_origins()
        self._check_devices()
        if (numpy := sys.modules.get("numpy.random")) is not None:
            found = [one.bit_generator for one in gc.get_objects() if issubclass(type(one), numpy.Generator)]
            self._generators += [one for one in found if _drew_its_seed(one)]
        self.after = dict(os.environ)
        return Report(
            read=sorted(self._read),
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
            shared = _shared_memory()
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - one that a script handles; the others go on
                failed.append(f"{name} ({type(error).__name__}: {error})"[:200])
            if _shared_memory() - shared:
                self._end("makes a lock or memory that processes share when it is imported")
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
            if executes:
                self._note_file(path)
            held = _held()
            try:
                return usual(own, module)
            finally:
                if name in ("random", "numpy.random", "torch"):
                    self._seeds = Seeds()
                if name == "torch":
                    self._at_torch = _environment()
                self._check(held)
                self._give_way()
                self._chain.pop()

        setattr(loader, method, watched)
        yield lambda: delattr(loader, method) if inherited else setattr(loader, method, usual)

    def _note_read(self, variable: str) -> None:
        self._read.add(variable)
        beginning = variable.removesuffix("*")
        of_ranks = self._orders["of_ranks"]
        named = [one for one in of_ranks if one == variable or (beginning != variable and one.startswith(beginning))]
        if named and self._chain and not {"torch", "sitecustomize"}.intersection(self._chain):
            problem = f"reads {named[0]} when it is imported"
            self._readers.setdefault(self._chain[-1], (problem, list(self._chain)))

    def _set_since_torch(self) -> list[str]:
        now, then = _environment(), self._at_torch
        if then is None:
            return []
        return sorted(os.fsdecode(one) for one in now.keys() | then.keys() if now.get(one) != then.get(one))

    def _seed_noted(self, usual: Any) -> Any:
        def seed(own: Any, a: Any = None, version: int = 2) -> None:
            self._generators = [one for one in self._generators if one is not own]
            if a is None:
                self._generators.append(own)
            usual(own, a, version)

        return seed

    def renew_generators(self) -> None:
        """Seed the generators again that modules have made for themselves."""
        for one in self._generators:
            if isinstance(one, random.Random):
                one.seed()
            else:
                one.state = type(one)().state

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
        self._tell(Report(problems=[(problem, list(self._chain))], final=final))
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
        threads = [one for one in threads if _comm(one) not in FORK_AWARE]
    return frozenset(threads), children, frozenset(filter(_is_open, opened))  # not the one that lists them


def _shared_memory() -> set[bytes]:
    """Return the mappings that a fork would share with this process, such as locks of ``multiprocessing``."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return {one for one in file if one.split(None, 2)[1].startswith(b"rw-s")}
    except OSError:
        return set()


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


def _comm(thread: str) -> bytes:
    try:
        with open(f"/proc/self/task/{thread}/comm", "rb") as file:
            return file.read().strip()
    except OSError:
        return b""


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


def _drew_its_seed(generator: Any) -> bool:
    """Whether a generator of numpy drew its seed from the system: numpy takes 128 bits, a script gives fewer."""
    entropy = getattr(generator.seed_seq, "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() > 64
