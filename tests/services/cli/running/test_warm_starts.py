"""Warm starts of `keepstep run` with real processes: a rank from the template is as one that a new Python runs."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep_cli.running.warm.warm_starts import _pipes
from tests.support.jobs.job import TRAINER
from tests.support.services.command import Command

DEADLINE = 110.0
WARM = r"restarts are warm from now on: process (\d+)"

LEARN = """
import os, signal, sys
from keepstep.runtime.learned_imports import tell_imports
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def learn():
    tell_imports(), tell_imports()
"""
"""``learn`` tells what is imported, as a Manager does after its first steps."""
WAIT = """
if again == 0:
    learn()
    print("ready", flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start(script: str, *flags: str, program: tuple[str, ...] = ("script.py",), **variables: str) -> Command:
            (tmp_path / "script.py").write_text(script)
            groups = () if "--replicas" in flags else ("--replicas", "1")
            given = ("run", *groups, *flags, "--lighthouse", "http://127.0.0.1:1", "--", *program)
            run = Command(tmp_path, *given, deadline=DEADLINE, **variables)
            stack.callback(run.close)
            return run

        yield start


def kill(run: Command, group: str = "r0") -> None:
    """Kill the newest process of a group."""
    pids = [match[1] for line in run.lines if (match := re.match(rf"\[{group}\] started.*, pid (\d+)", line))]
    os.kill(int(pids[-1]), signal.SIGKILL)


def until_warm(run: Command, times: int) -> None:
    """Wait until a template has been made ``times`` times."""
    while sum(re.search(WARM, line) is not None for line in run.lines) < times:
        run.wait_for(WARM)


def second_life(run: Command, *, warm: bool) -> str:
    """Return what the rank prints behind ``state`` in its second life."""
    run.wait_for("ready")
    if warm:
        run.seen(WARM)
    kill(run)
    found = run.wait_for(r"\[r0/0\] state (.*)")[1]
    start = next(line for line in reversed(run.lines) if line.startswith("[r0] started again"))
    assert start.endswith(", warm") == warm, start
    return found


STATE = (
    LEARN
    + """
import atexit, gc, inspect, json, logging, multiprocessing, numpy, pickle, random, re, resource, socket
import sysconfig, tempfile, threading, warnings, decimal, helper
from pathlib import Path

class Kept:
    def __init__(self, value):
        self.value = value

def squared(kept):
    return Kept(kept.value ** 2), os.getcwd(), sys.argv, sorted(set(sys.modules) & {"helper", "numpy"})

def plain(value):
    return re.sub("0x[0-9a-f]+", "", repr(value))

def process(name):
    return Path(f"/proc/self/{name}").read_text()

def state():
    main = sys.modules["__main__"]
    numbers = [int(one) for one in os.listdir("/proc/self/fd")]
    descriptors = {n: re.sub(r"\\d+", "N", os.readlink(f"/proc/self/fd/{n}")) for n in numbers if n < 3 or is_open(n)}
    random.seed(5), numpy.random.seed(5)
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
        "cmdline": process("cmdline"), "comm": process("comm"),
        "main": {n: plain(v) for n, v in vars(main).items() if n.startswith("__") and n != "__builtins__"},
        "main order": [n for n in vars(main)][:9],
        "modules": sorted(sys.modules), "meta path": [plain(one) for one in sys.meta_path],
        "environment": {n: v for n, v in os.environ.items() if n != "MASTER_PORT"}, "order": list(os.environ),
        "folder": os.getcwd(), "umask": process("status").split("Umask:")[1].split()[0],
        "masks": [one for one in process("status").splitlines() if one.startswith(("SigB", "SigI", "SigC", "Cap"))],
        "handlers": {n: str(signal.getsignal(n)) for n in sorted(signal.valid_signals())},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "descriptors": descriptors,
        "inheritable": [n for n in range(3) if os.get_inheritable(n)],
        "offsets": [stream.seekable() for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "streams": [str((s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()))
                    for s in (sys.stdin, sys.stdout, sys.stderr)],
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "main thread": threading.main_thread() is threading.current_thread()
                       and threading.main_thread().ident == threading.get_ident()
                       and threading.main_thread().native_id == os.getpid(),
        "children": process(f"task/{os.getpid()}/children"),
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()],
        "atexit": atexit._ncallbacks(),
        "logging": [str(logging.getLogger().handlers), logging.getLogger().level, logging.Logger.manager.disable],
        "warnings": [str(one) for one in warnings.filters],
        "tracing": [sys.gettrace(), sys.getprofile()],
        "depth": len(inspect.stack()),
        "random": [random.random(), float(numpy.random.rand()), str(decimal.getcontext())],
        "helper": helper.MADE_IN == os.getpid(),
        "site": [name in sys.modules for name in ("sitecustomize", "usercustomize")],
        "relative": logging.makeLogRecord({}).relativeCreated < 10_000,
        "file": [__file__, __name__, str(__spec__)],
    }

def is_open(number):
    try:
        os.get_inheritable(number)
        return True
    except OSError:
        return False
"""
)


ENDS = """
if __name__ == "__main__":
    spread = {}
    for how in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            kept, *rest = pool.apply(squared, (Kept(3),))
        spread[how] = [type(kept) is Kept, kept.value, *rest]
    print("state", json.dumps({**found, "spread": spread}), flush=True)
"""


def test_a_warm_start_has_the_state_of_a_cold_one(started, tmp_path: Path) -> None:
    """The only differences that are left out: pids, ports, and the time."""
    (tmp_path / "helper.py").write_text("import os\nMADE_IN = os.getpid()\n")
    (tmp_path / "sub").mkdir()
    guarded = "\nif __name__ == '__main__':\n    found = state()\n" + WAIT.replace("\n", "\n    ")
    script = STATE + guarded + ENDS
    program = ("script.py", "--lr", "0.1", "-x", "ü")
    found = []
    for flags in ((), ("--cold",)):
        run = started(script, *flags, program=program, OMP_NUM_THREADS="1")
        found.append(json.loads(second_life(run, warm=not flags)))
        assert run.wait() == 0
    warm, cold = found
    for name in ("KEEPSTEP_IMPORTS", "KEEPSTEP_NAME_FILE", "TORCHELASTIC_RUN_ID"):
        values = [one["environment"].pop(name, None) for one in found]
        assert name == "KEEPSTEP_IMPORTS" or None not in values
    for one in found:
        one["order"] = [name for name in one["order"] if name != "KEEPSTEP_IMPORTS"]
    modules = [set(one.pop("modules")) for one in found]
    assert modules[0] ^ modules[1] == set()
    assert {name: (value, cold[name]) for name, value in warm.items() if value != cold[name]} == {}
    assert warm["helper"], "a module of the script's own folder is imported by each rank itself"
    assert warm["spread"]["spawn"][:2] == [True, 9]


TORCH = (
    LEARN
    + """
import json, torch, torch.utils.data, keepstep.manager, keepstep.ddp, keepstep.optim

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.rand(1) + index

def names(modules):
    return __import__("hashlib").sha256(" ".join(sorted(modules)).encode()).hexdigest()

def facts():
    torch.manual_seed(5)
    weights = torch.nn.Linear(64, 64)
    weights(torch.rand(512, 64)).square().sum().backward()
    torch.optim.AdamW(weights.parameters()).step()
    loaders = {how: torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context=how)
               for how in ("fork", "spawn")}
    torch.manual_seed(7)
    return {
        "drawn": torch.rand(3).tolist(), "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(), "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(), "weights": [float(one.sum()) for one in weights.parameters()],
        "loaded": {how: torch.cat(list(one)).flatten().tolist() for how, one in loaders.items()},
        "bad fork": torch.cuda._is_in_bad_fork(), "cuda": torch.cuda.is_initialized(),
        "shared": float(torch.ones(3).share_memory_().sum()), "modules": names(sys.modules),
    }
"""
)


@pytest.mark.timeout(400)
def test_torch_computes_the_same_after_a_warm_start(started) -> None:
    """With two threads, as a pool of OpenMP must not be forked. It takes two starts of torch."""
    main, tell = "\nif __name__ == '__main__':\n", "    print('state', json.dumps(facts()), flush=True)\n"
    run = started(TORCH + main + WAIT.replace("\n", "\n    ") + "\n" + tell, OMP_NUM_THREADS="2")
    warm = json.loads(second_life(run, warm=True))
    assert run.wait() == 0
    run = started(TORCH + main + tell, "--cold", OMP_NUM_THREADS="2")
    cold = json.loads(run.wait_for(r"\[r0/0\] state (.*)")[1])
    assert run.wait() == 0
    assert warm == cold
    assert warm["threads"] == 2
    assert not warm["bad fork"]


@pytest.mark.timeout(400)
def test_a_killed_group_heals_after_a_warm_start(tmp_path: Path) -> None:
    """A real job, whose Managers tell what is imported. It takes a start of torch and the imports of the template."""
    groups = ("run", "--replicas", "2", "--", str(TRAINER))
    run = Command(tmp_path, *groups, deadline=DEADLINE, TRAINER_PACE="0.3")
    try:
        run.wait_for(WARM)
        kill(run, "r1")
        run.wait_for(r"\[r1\] started again, pid \d+, warm")
        run.wait_for(r"\[r1\] healed .* from r0")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    finally:
        run.close()


def test_unseeded_random_numbers_differ_between_warm_starts(started) -> None:
    script = LEARN + "import multiprocessing, numpy, random, torch, uuid, tempfile\n"
    script += """
key = bytes(multiprocessing.current_process().authkey).hex()
drawn = random.random(), numpy.random.rand(), float(torch.rand(1)), torch.initial_seed()
print("drawn", *drawn, uuid.uuid4(), key, next(tempfile._get_candidate_names()), flush=True)
if again < 3:
    learn() if again == 0 else None
    signal.pause()
"""
    run = started(script, "--replicas", "1")
    drawn = [run.wait_for(r"drawn (.*)")[1].split()]
    run.seen(WARM)
    for _ in range(3):
        kill(run)
        drawn.append(run.wait_for(r"drawn (.*)")[1].split())
    assert run.wait() == 0
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 4, values


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(7)", "exited with 7"),
        ("sys.exit('no')", "exited with 1"),
        ("raise ValueError('no')", "exited with 1"),
        ("raise KeyboardInterrupt", "was killed by SIGINT"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM"),
        ("os._exit(3)", "exited with 3"),
    ],
)
def test_the_end_of_a_warm_rank_is_reported_with_its_output(started, end: str, code: str) -> None:
    script = LEARN + WAIT + f"import atexit\natexit.register(print, 'at exit', flush=True)\n{end}\n"
    told = []
    for flags in ((), ("--cold",)):
        run = started(script, *flags, "--max-restarts", "1")
        run.wait_for("ready")
        if not flags:
            run.seen(WARM)
        kill(run)
        run.wait_for(r"started again")
        before = len(run.lines)
        assert run.wait() == 1
        told.append(sorted(line for line in run.lines[before:] if line.startswith("[r0")))
    assert told[0] == told[1]
    assert f"[r0] rank 0 {code}" in told[0]


def test_the_module_form_starts_warm_too(started, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(
        LEARN
        + WAIT
        + 'print("state", __name__, __package__, sys.argv[1:], __spec__.name, sys.path[0] == os.getcwd())\n'
    )
    run = started("", program=(sys.executable, "-m", "package.train", "--x"))
    assert second_life(run, warm=True) == "__main__ package ['--x'] package.train True"
    assert run.wait() == 0


def test_ranks_of_a_group_restart_warm_together_as_children_of_the_command(started) -> None:
    script = LEARN + 'print("life", again, os.getppid(), flush=True)\n' + WAIT
    run = started(script, "--replicas", "2", "--nproc-per-replica", "2")
    run.wait_for("ready", times=4)
    run.seen(WARM)
    kill(run, "r1")
    parents = [run.wait_for(r"life 1 (\d+)")[1] for _ in range(2)]
    assert parents == [str(run.process.pid)] * 2
    run.seen(r"\[r1\] started again, pid \d+ \d+, warm")
    run.wait_for(r"\[r1\] ended: exit code 0")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM


def test_a_changed_script_or_module_starts_cold_and_is_learned_again(started, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("VALUE = 1\n")
    script = """
import own, time
print("value", own.VALUE, "life", again, flush=True)
while not os.path.exists("learn"):
    time.sleep(0.01)  # until the test, another process, creates the file
learn()
signal.pause()
"""
    script = LEARN + script
    run = started(script, "--preload", "own")
    run.wait_for("value 1 life 0")
    until_warm(run, 1)
    (tmp_path / "learn").touch()
    until_warm(run, 2)
    kill(run)
    run.wait_for("value 1 life 1")
    (tmp_path / "own.py").write_text("VALUE = 1 + 1\n")
    kill(run)
    run.wait_for("value 2 life 2")
    assert any("own.py has changed: this start is cold" in line for line in run.lines)
    until_warm(run, 3)
    kill(run)
    run.wait_for("value 2 life 3")
    assert [line for line in run.lines if "started again" in line][-1].endswith(", warm")
    (tmp_path / "script.py").write_text(script.replace('"value"', '"number"'))
    kill(run)
    run.wait_for("number 2 life 4")
    until_warm(run, 4)


def test_a_module_that_starts_a_thread_is_named_once_and_left_out(started, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(999,), daemon=True).start()\n"
    )
    (packages / "calm.py").write_text("import json\n")
    (packages / "above.py").write_text("import busy\n")
    script = (
        LEARN + "import calm, above\n" + WAIT + 'import busy, threading\nprint("state", threading.active_count())\n'
    )
    run = started(script, PYTHONPATH=str(packages))
    assert second_life(run, warm=True) == "2"
    assert run.wait() == 0
    told = [line for line in run.lines if "busy" in line]
    assert told == ["[run] restarts are warm without busy, which starts a thread when it is imported"]


PARALLEL = """
import torch
torch.set_num_threads(2)
SUM = torch.ones(1_000_000).sum()
"""
"""Its threads would be missing after a fork, and the next sum would wait for them for ever."""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import socket\nSOCKET = socket.socket()", "leaves a socket open"),
        ("import subprocess\nCHILD = subprocess.Popen(['sleep', '999'])", "starts a process"),
        ("import multiprocessing\nLOCK = multiprocessing.Lock()", "makes a lock or memory that processes share"),
        ("import mmap\nMEMORY = mmap.mmap(-1, 100)", "makes a lock or memory that processes share"),
        (PARALLEL, "starts a thread"),
        ("import random\nrandom.seed(1)", "seeds random numbers"),
        ("import numpy\nnumpy.random.seed(1)", "seeds random numbers"),
        ("import random\nrandom.random()", None),
    ],
)
def test_a_module_whose_import_no_fork_may_copy_is_left_out(
    started, tmp_path: Path, code: str, reason: str | None
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "acts.py").write_text(f"{code}\nimport os\nMADE_IN = os.getpid()\n")
    script = LEARN + "import acts\n" + WAIT + 'print("state", acts.MADE_IN == os.getpid())\n'
    run = started(script, PYTHONPATH=str(packages))
    assert second_life(run, warm=True) == str(reason is not None)
    left_out = [f"[run] restarts are warm without acts, which {reason} when it is imported"] if reason else []
    assert [line for line in run.lines if "acts" in line] == left_out
    assert run.wait() == 0


def test_a_variable_that_imports_read_and_the_script_sets_keeps_starts_cold(started, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "reads.py").write_text(
        "import os\nVALUE = os.environ.get('OF_THE_SCRIPT')\nos.environ['OF_IMPORT'] = 'x'\n"
    )
    script = LEARN + 'os.environ["OF_THE_SCRIPT"] = "1"\nimport reads\n' + WAIT
    script += 'print("state", reads.VALUE, os.environ["OF_IMPORT"])\n'
    run = started(script, PYTHONPATH=str(packages))
    run.wait_for("ready")
    run.seen("restarts are cold: the script sets OF_THE_SCRIPT, which its imports read")
    kill(run)
    assert run.wait_for(r"state (.*)")[1] == "1 x"
    assert run.wait() == 0


def test_a_module_that_reads_a_variable_of_its_rank_is_imported_by_each_rank(started, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "reads.py").write_text("import os\nVALUE = os.environ.get('RANK')\nos.environ['SET'] = VALUE\n")
    (packages / "above.py").write_text("import reads\n")
    (packages / "replica.py").write_text("import os\nFOUND = [v for n, v in os.environ.items() if 'REPLICA_G' in n]\n")
    (packages / "calm.py").write_text("import os\nMADE_IN = os.getpid()\n")
    script = LEARN + "import above, calm, replica, reads\n" + WAIT
    script += 'print("state", reads.VALUE, os.environ["SET"], replica.FOUND[0], calm.MADE_IN == os.getpid())\n'
    run = started(script, "--replicas", "2", "--nproc-per-replica", "2", PYTHONPATH=str(packages))
    run.wait_for("ready", times=4)
    run.seen(WARM)
    kill(run, "r1")
    for rank in (0, 1):
        run.seen(rf"\[r1/{rank}\] state {rank} {rank} 1 False$")
    run.seen(r"\[r1\] started again, pid \d+ \d+, warm")
    told = sorted(line for line in run.lines if "restarts are warm without" in line)
    assert told == [
        "[run] restarts are warm without reads, which reads RANK when it is imported",
        "[run] restarts are warm without replica, which reads REPLICA_GROUP_ID when it is imported",
    ]
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM


def test_a_module_that_is_left_out_may_set_variables_of_torch_after_its_import(started, tmp_path: Path) -> None:
    """As lightning does. It takes two starts of torch."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "late.py").write_text("import torch, os\nVALUE = os.environ['RANK']\nos.environ['PYTORCH_X'] = VALUE\n")
    script = LEARN + "import late\n" + WAIT + 'print("state", late.VALUE, os.environ["PYTORCH_X"])\n'
    run = started(script, "--nproc-per-replica", "2", PYTHONPATH=str(packages))
    run.wait_for("ready", times=2)
    run.seen(WARM)
    kill(run)
    for rank in (0, 1):
        run.seen(rf"\[r0/{rank}\] state {rank} {rank}$")
    run.seen(r"\[r0\] started again, pid \d+ \d+, warm")
    assert run.wait() == 0


def test_a_rank_starts_cold_if_sitecustomize_reads_a_variable_that_differs(started, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text("import os, sys\nsys.value = os.environ.get('REPLICA_GROUP_ID')\n")
    script = LEARN + WAIT + 'print("state", sys.value)\n'
    run = started(script, "--replicas", "2", PYTHONPATH=str(packages))
    run.wait_for("ready", times=2)
    run.seen(WARM)
    for group in ("r0", "r1"):
        kill(run, group)
        run.wait_for(rf"\[{group}/0\] state {group[1]}$")
    assert run.wait() == 0
    warm = [line for line in run.lines if line.endswith(", warm")]
    assert len(warm) == 1
    assert warm[0].startswith("[r0]")
    assert "[run] some starts are cold: REPLICA_GROUP_ID differs, which their imports read" in run.lines


def test_a_changed_file_of_an_installed_module_is_not_started_warm(started, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "edited.py").write_text("VALUE = 1\n")
    run = started(LEARN + "import edited\n" + WAIT + 'print("state", edited.VALUE)\n', PYTHONPATH=str(packages))
    run.wait_for("ready")
    run.seen(WARM)
    (packages / "edited.py").write_text("VALUE = 1 + 1\n")
    kill(run)
    assert run.wait_for(r"state (.*)")[1] == "2"
    assert any("edited.py has changed: this start is cold" in line for line in run.lines)
    assert run.wait() == 0


def test_generators_that_modules_make_for_themselves_differ_unless_they_are_seeded(started, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "draws.py").write_text(
        "import random, numpy\nOWN, FIXED, LATER = random.Random(), random.Random(3), random.Random()\nLATER.seed(4)\n"
        "NUMPY, FIXED_NUMPY = numpy.random.default_rng(), numpy.random.default_rng(5)\n"
    )
    script = LEARN + "import draws\n"
    script += """
fixed = draws.FIXED.random(), draws.LATER.random(), draws.FIXED_NUMPY.random()
print("drawn", draws.OWN.random(), draws.NUMPY.random(), "fixed", *fixed, flush=True)
if again < 2:
    learn() if again == 0 else None
    signal.pause()
"""
    run = started(script, PYTHONPATH=str(packages))
    drawn = [run.wait_for(r"drawn (.*) fixed (.*)")]
    run.seen(WARM)
    for _ in range(2):
        kill(run)
        drawn.append(run.wait_for(r"drawn (.*) fixed (.*)"))
    assert run.wait() == 0
    assert len([line for line in run.lines if line.endswith(", warm")]) == 2
    for values in zip(*(one[1].split() for one in drawn), strict=True):
        assert len(set(values)) == 3, values
    assert len({one[2] for one in drawn}) == 1


def test_a_warm_rank_that_tells_its_imports_compares_with_its_own_start(started, tmp_path: Path) -> None:
    """The kernel keeps the environment of the template for it, which has another ``PYTHONPATH``."""
    script = (
        LEARN
        + """
import time
print(os.environ["REPLICA_GROUP_ID"], "life", again, flush=True)
while again and not os.path.exists(f"learn{os.environ['REPLICA_GROUP_ID']}"):
    time.sleep(0.01)  # until the test, another process, creates the file
learn()
signal.pause()
"""
    )
    run = started(script, "--replicas", "2")
    until_warm(run, 1)
    kill(run, "r1")
    run.wait_for("1 life 1")
    (tmp_path / "script.py").write_text(script + "\n")
    kill(run, "r0")
    run.wait_for("0 life 1")
    assert any("script.py has changed" in line for line in run.lines), "\n".join(run.lines)
    (tmp_path / "learn1").touch()
    until_warm(run, 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM


def test_debuggers_and_coverage_keep_all_starts_cold(started) -> None:
    run = started(LEARN + WAIT + 'print("state", 1)\n', "--preload", "json", COVERAGE_PROCESS_START="/dev/null")
    assert second_life(run, warm=False) == "1"
    assert "[run] all starts are cold: COVERAGE_PROCESS_START is set" in run.lines
    assert run.wait() == 0


def test_a_killed_template_costs_nothing_but_a_cold_start(started) -> None:
    script = LEARN + 'print("life", again, flush=True)\nlearn()\nsignal.pause()\n'
    run = started(script)
    template = int(run.wait_for(WARM)[1])
    os.kill(template, signal.SIGKILL)
    run.wait_for("the template process ended")
    kill(run)
    run.wait_for("life 1")
    assert next(line for line in run.lines if "started again" in line).count("warm") == 0
    until_warm(run, 2)
    kill(run)
    run.wait_for("life 2")
    assert [line for line in run.lines if "started again" in line][-1].endswith(", warm")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_a_start_does_not_wait_for_a_stopped_template(started) -> None:
    script = LEARN + 'print("life", again, flush=True)\nlearn()\nsignal.pause()\n'
    run = started(script)
    template = psutil.Process(int(run.wait_for(WARM)[1]))
    template.suspend()
    kill(run)
    run.wait_for("life 1")
    assert any("the template process has been stopped by a signal: this start is cold" in line for line in run.lines)
    until_warm(run, 2)
    assert not template.is_running()
    kill(run)
    run.wait_for("life 2")
    assert [line for line in run.lines if "started again" in line][-1].endswith(", warm")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_nothing_survives_the_sigkill_of_the_command(started) -> None:
    script = LEARN + 'print("life", again, os.getpid(), flush=True)\nlearn()\nsignal.pause()\n'
    run = started(script)
    template = int(run.wait_for(WARM)[1])
    kill(run)
    rank = int(run.wait_for(r"life 1 (\d+)")[1])
    while not (ahead := [one for one in psutil.Process(run.process.pid).children() if one.name() == "keepstep-next"]):
        pass  # until the rank that is forked ahead dies with the command: a stop before that would keep it
    ahead[0].suspend()
    processes = [*ahead, psutil.Process(rank), psutil.Process(template)]
    run.process.kill()
    run.process.wait(DEADLINE)  # from then on both are orphans, which come to this process
    _, alive = psutil.wait_procs(processes, DEADLINE)
    assert not alive


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_warm_ranks_cleanly_and_no_process_is_left(started, signum: int) -> None:
    script = (
        LEARN
        + """
def end(*_):
    print("ended cleanly", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("life", again, flush=True)
learn()
while True:
    signal.pause()
"""
    )
    run = started(script)
    template = psutil.Process(int(run.wait_for(WARM)[1]))
    kill(run)
    run.wait_for("life 1")
    run.process.send_signal(signum)
    assert run.wait() == 128 + signum
    assert "[r0/0] ended cleanly" in run.lines
    assert not template.is_running()


def test_orphans_of_warm_ranks_are_reaped(started) -> None:
    """``keepstep run`` adopts them, as process 1 of a container does."""
    script = (
        LEARN
        + """
print("life", again, flush=True)
if again == 1:
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        print("orphan", os.getpid(), flush=True)
        os._exit(0)
learn()
signal.pause()
"""
    )
    run = started(script)
    run.wait_for(WARM)
    kill(run)
    orphan = int(run.wait_for(r"orphan (\d+)")[1])
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(orphan).wait(DEADLINE)  # a zombie that no process reaps stays
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM


def may_unshare() -> bool:
    tool = shutil.which("unshare")
    return (
        tool is not None
        and subprocess.run([tool, "--pid", "--fork", "--mount-proc", "true"], check=False).returncode == 0
    )


def test_as_process_1_of_a_container_ranks_start_warm_and_all_end(tmp_path: Path) -> None:
    if not may_unshare():
        pytest.skip("needs the right to make a pid namespace")
    (tmp_path / "script.py").write_text(
        LEARN + 'print("life", again, os.getppid(), flush=True)\nlearn()\nsignal.pause()\n'
    )
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        sys.executable,
        "-m",
        "keepstep_cli",
        "run",
    ]
    command += ["--replicas", "1", "--lighthouse", "http://127.0.0.1:1", "--", "script.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **streams) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if re.search(WARM, line):
                (inner,) = psutil.Process(process.pid).children()
                (rank,) = [one for one in inner.children() if not one.name().startswith("keepstep-")]
                rank.kill()
            if "life 1" in line:
                inner.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 128 + signal.SIGTERM, "\n".join(lines)
    assert "[r0/0] life 1 1" in lines, "its parent is process 1"
    assert any(line.endswith(", warm") for line in lines)


def test_cold_and_preload_exclude_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keepstep_cli", "run", "--cold", "--preload", "x", "--replicas", "1", "--", "true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--preload has no effect" in done.stderr


def test_pipes_that_cannot_all_be_opened_leave_no_descriptor_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fill: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with contextlib.suppress(OSError):
            while True:
                fill.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(3):
            os.close(fill.pop())
        for _ in range(4):
            with pytest.raises(OSError, match="Too many open files"):
                _pipes(3)
        fill += [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in fill:
            os.close(one)
