"""The last lines of a rank's output, and what they say about its end. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from pathlib import PurePath

from keepstep_mesh.exit_codes import EXIT_GROUP_FAILED

MAX_CHARACTERS = 16_000
"""Of the last lines of a rank."""
MAX_LINE = 400
MAX_SENTENCE = 300
HIDDEN = "[hidden]"
_SECRET = re.compile(
    r"""(?i)\b([\w-]*(?:token(?!s)|secret|passw(?:or)?d|authorization|api_?key)[\w-]*["']?\s*[=:]\s*).+"""
)
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen")
_OF_KEEPSTEP = "keepstep: "
TERMINATED = -15


class LastLines:
    """The newest lines, within ``MAX_CHARACTERS``."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, bool]] = deque()
        self._characters = 0

    def add(self, text: str, *, error: bool) -> None:
        """Add a line. ``error``: of the standard error."""
        text = _SECRET.sub(rf"\1{HIDDEN}", text[:MAX_LINE])
        self._lines.append((text, error))
        self._characters += len(text) + 1
        while self._characters > MAX_CHARACTERS:
            self._characters -= len(self._lines.popleft()[0]) + 1

    @property
    def text(self) -> str:
        return "\n".join(text for text, _ in self._lines)

    @property
    def errors(self) -> list[str]:
        """The lines of the standard error."""
        return [text for text, error in self._lines if error]


def exception_of(lines: Sequence[str]) -> str:
    """Return the last exception that Python printed, with its innermost line, of the script if possible.

    Returns:
        ``ValueError: bad value (train.py:12 main)``; empty: none was printed.
    """
    starts = [place for place, line in enumerate(lines) if line == _TRACEBACK]
    starts = starts or [place for place, line in enumerate(lines) if _FRAME.match(line)][-1:]  # an error of syntax
    if not starts:
        return ""
    frames = []
    for line in lines[starts[-1] :]:
        if (frame := _FRAME.match(line)) is not None:
            frames.append(frame)
        elif frames and not line.startswith(" "):
            return f"{line[:MAX_SENTENCE]} ({_place(frames)})"
    return ""


def _place(frames: Sequence[re.Match[str]]) -> str:
    own = [one for one in frames if not _LIBRARIES.search(one["file"])]
    frame = (own or frames)[-1]
    return f"{PurePath(frame['file']).name}:{frame['line']} {frame['function'] or ''}".strip()[:MAX_SENTENCE]


def said_by_keepstep(lines: Sequence[str]) -> str:
    """Return the last sentence that keepstep printed before it ended a process; empty: none."""
    said = (line.removeprefix(_OF_KEEPSTEP) for line in reversed(lines) if line.startswith(_OF_KEEPSTEP))
    return next(said, "")[:MAX_SENTENCE]


def cause_of(ranks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the rank whose end was the cause, and its exit code: the others end because of it.

    Args:
        ranks: rank and exit code, in the order of their ends.
    """
    consequences = (0, EXIT_GROUP_FAILED, TERMINATED)
    own = (one for one in ranks if one[1] not in consequences)
    return next(own, None) or next((one for one in ranks if one[1]), ranks[0])


def oom_kills(text: str) -> int | None:
    """Return the count ``oom_kill`` of ``memory.events``, or ``memory.oom_control`` of older cgroups; None: absent."""
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return None if found is None else int(found[1])


def memory_files(cgroup: str) -> list[str]:
    """Return the files that may have that count, best first.

    Args:
        cgroup: ``/proc/self/cgroup``: a line for each hierarchy. A container may show a path that it does not have.
    """
    found = []
    for line in cgroup.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.oom_control"
            return [f"{root}{path.rstrip('/')}/{name}", f"{root}/{name}"]
        if number == "0":
            found = [f"/sys/fs/cgroup{path.rstrip('/')}/memory.events", "/sys/fs/cgroup/memory.events"]
    return found
