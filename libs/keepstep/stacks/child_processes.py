"""The child processes of this process, such as workers of data loaders, and their stacks where they can be had.

A forked child writes its stacks on a signal (``rank_stacks``). Of a child that runs another program only its state is
known, as the kernel tells it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from keepstep.stacks.thread_stacks import short_path
from keepstep_mesh.protocol.stack_messages import MAX_CHILDREN
from keepstep_mesh.threads.dumped_stacks import dumped_stacks

MAX_CHILD_FRAMES = 8
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MIB = 1 << 20
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a device", "T": "is stopped", "t": "is traced", "Z": "has ended"}


def child_processes() -> tuple[str, ...]:
    """Return a sentence about each child. It waits up to half a second for the stacks of each."""
    return tuple(map(_described, _children()[:MAX_CHILDREN]))


def work_done(native_id: int, *, with_children: bool) -> int:
    """Return a number that grows while work is done: see ``RankStacks.work``, without the GPU.

    Whole MiB and seconds: a child that only polls for work now and then does not count.

    Args:
        native_id: of a thread of this process: its input and output.
        with_children: the thread waits for the child processes, so their work counts.
    """
    done = _mebibytes(f"/proc/self/task/{native_id}")
    for pid in _children() if with_children else ():
        done += _mebibytes(f"/proc/{pid}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            done += sum(map(int, times)) // _TICKS_PER_SECOND
    return done


def _mebibytes(folder: str) -> int:
    """Return what was read and written, in MiB; 0: the kernel does not count it, or it is not ours to see."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return sum(int(line.split()[1]) for line in Path(f"{folder}/io").read_text().splitlines()[:2]) // _MIB
    return 0


def kill_children() -> None:
    """Kill all child processes: a worker that hangs would outlive this process, with its memory and its output."""
    for pid in _children():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return sorted(found)


def _described(pid: int) -> str:
    name, state, where = "process", "", ""
    with contextlib.suppress(OSError):
        about = Path(f"/proc/{pid}/stat").read_text()
        name, state = about[about.index("(") + 1 : about.rindex(")")], about[about.rindex(")") + 2]
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    said = f"{name} {pid} {_STATES.get(state, state)}{f' in {where}' if where else ''}"
    frames = "" if state in "TtZ" or pid == os.getpid() else _frames(dumped_stacks(pid))
    return f"{said}: {frames}" if frames else said


def _frames(text: str) -> str:
    """Return the innermost frames of the current thread, the innermost first."""
    current = text[text.find("Current thread") :] if "Current thread" in text else text
    found = [
        f"{short_path(one['file'])}:{one['line']} {one['function']}"
        for one in _FRAME.finditer(current.partition("\n\n")[0])
    ]
    return " < ".join(found[:MAX_CHILD_FRAMES])
