"""Stacks of the threads of this process: names and lines, no values.

A stack also tells for whom its thread waits, because keepstep and torch wait in code of their own. So a step does not
have to note it.
"""

from __future__ import annotations

import linecache
import re
import site
import sys
import sysconfig
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from keepstep_mesh.protocol.stack_messages import MAX_FRAME_TEXT, MAX_FRAMES, MAX_THREADS, ThreadStack

MAX_SOURCE = 80
"""Characters of a line of source."""
GROUPS, RANKS, CHECKPOINT, COMPILATION = "groups", "ranks", "checkpoint", "compilation"
"""Values of ``RankStacks.waits``."""
_OWN_ROOMS = {"checkpoint": CHECKPOINT, "relay_client": CHECKPOINT, "elastic_data": "", "data": ""}
"""``waits`` of a thread whose last frame is in this room of keepstep; any other room waits for the other groups."""
_CHILDREN = ("/torch/utils/data/", "/multiprocessing/", "/concurrent/futures/", "/subprocess.py")
_STRING = re.compile(r"""(['"]).*?\1""")
_NUMBERED = re.compile(r"[-_ (]*\d+\)?$")
_INSTALLED = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        "<frozen",
    }
)
_SOURCES = f"{Path(__file__).parents[2]}/"
"""Folder of the packages of keepstep, which may be a clone."""
_CHECKPOINTS = ("/torch/serialization.py", "/torch/distributed/checkpoint/", "/safetensors/")
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/triton/compiler/")
_COLLECTIVES = ("/torch/distributed/",)


def thread_stacks(training_thread: int) -> tuple[tuple[ThreadStack, ...], FrameType | None]:
    """Return the stacks of all threads, that of the training thread first, and the frame of that thread.

    Threads with equal stacks are one entry, which counts them. Call it on a thread of keepstep: it is left out.
    """
    names = {one.ident: one.name for one in threading.enumerate()}
    frames = sys._current_frames()  # noqa: SLF001  the standard library has no public name for it
    training = frames.pop(training_thread, None)
    frames.pop(threading.get_ident(), None)
    found: Counter[ThreadStack] = Counter()
    for ident, frame in frames.items():
        name = _NUMBERED.sub("", names.get(ident, "thread"))
        found[ThreadStack(name, _stack(frame))] += 1
    others = [ThreadStack(f"{one.thread} (x{n})" if n > 1 else one.thread, one.frames) for one, n in found.items()]
    own = [] if training is None else [ThreadStack(names.get(training_thread, "MainThread"), _stack(training))]
    return (*own, *others)[:MAX_THREADS], training


def script_line(frame: FrameType | None) -> tuple[str, int, str, dict[str, object]] | None:
    """Return file, line, function and globals of the innermost frame of the script; None: it has none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_own(frame) and not name.startswith(_INSTALLED):
            return name, frame.f_lineno, frame.f_code.co_name, frame.f_globals
        frame = frame.f_back
    return None


def shown_line(found: tuple[str, int, str, dict[str, object]] | None) -> str:
    """Return a line as ``train.py:88 next(batches)``, without what is in quotes. It reads the file, if it can."""
    if found is None:
        return ""
    file, line, function, variables = found
    source = _STRING.sub(r"\1...\1", linecache.getline(file, line, variables).strip())[:MAX_SOURCE]
    return f"{short_path(file)}:{line} {source or function}"[:MAX_FRAME_TEXT]


def waits_for(frame: FrameType | None) -> str:
    """Return for whom the thread of this frame waits, see ``RankStacks.waits``."""
    while frame is not None:
        name = frame.f_code.co_filename
        if _package(frame) == "keepstep_chaos":  # a hang that was ordered
            return ""
        if _is_own(frame):
            room = str(frame.f_globals.get("__name__", "")).split(".")[1:2]
            return _OWN_ROOMS.get(room[0] if room else "", GROUPS)
        if any(part in name for part in _CHECKPOINTS):
            return CHECKPOINT
        if any(part in name for part in _COMPILERS):
            return COMPILATION
        if any(part in name for part in _COLLECTIVES):
            return RANKS
        if not name.startswith(_INSTALLED):
            return ""
        frame = frame.f_back
    return ""


def waits_for_children(frame: FrameType | None) -> bool:
    """Return whether the thread of this frame waits in a library that starts processes, such as a loader."""
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _CHILDREN):
            return True
        frame = frame.f_back
    return False


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    shown: list[str] = []
    while frame is not None and len(shown) < MAX_FRAMES:
        code = frame.f_code
        shown.append(f"{short_path(code.co_filename)}:{frame.f_lineno} {code.co_qualname}"[:MAX_FRAME_TEXT])
        frame = frame.f_back
    return tuple(reversed(shown))


def _is_own(frame: FrameType) -> bool:
    return _package(frame) in ("keepstep", "keepstep_mesh", "keepstep_chaos")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def short_path(file: str) -> str:
    """Return the path of a library from its package on, and of another file its name."""
    for folder in _INSTALLED:
        if file.startswith(f"{folder}/"):
            return file[len(folder) + 1 :].removeprefix("site-packages/")
    return file.removeprefix(_SOURCES) if file.startswith(f"{_SOURCES}keepstep") else file.rpartition("/")[2]
