"""Messages about the stacks of a rank: what each of its threads does now. On the wire as in ``messages``.

The lighthouse asks a group only if the group is late, or an operator asks. Rank 0 passes the request on to its ranks,
and their answers to the lighthouse. No value of a variable is in an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from keepstep_mesh.protocol.membership import Sentence
from keepstep_mesh.text import printable

MAX_THREADS = 32
MAX_FRAMES = 48
MAX_FRAME_TEXT = 160
MAX_CHILDREN = 32
"""Limits of one answer: threads, frames of a thread, characters of a frame, child processes."""


@dataclass(frozen=True, slots=True)
class StacksRequest:
    """Send the stacks of all ranks of the group."""

    kind: ClassVar[str] = "stacks?"
    number: int
    """The answers have the same number."""


@dataclass(frozen=True, slots=True)
class ThreadStack:
    thread: Sentence
    """Name of the thread; ``MainThread`` is the training thread of most scripts."""
    frames: tuple[Sentence, ...]
    """``file:line function``, the outermost first; of a long stack the innermost ones."""


@dataclass(frozen=True, slots=True)
class RankStacks:
    """The stacks of one rank."""

    kind: ClassVar[str] = "stacks"
    number: int
    rank: int
    line: Sentence = ""
    """Innermost line of the training script on its main thread: ``train.py:88 next(batches)``."""
    waits: str = ""
    """For whom its main thread waits: ``groups`` or ``ranks`` (others must act), ``checkpoint``, ``compilation``;
    empty: for none of these."""
    section: Sentence = ""
    """The section that the script has declared (``Manager.section``); empty: none."""
    section_ms: int = 0
    """Time since the section began."""
    section_limit_ms: int = 0
    step: int = 0
    """Steps that the group has committed."""
    collectives: int = 0
    """Collectives over the groups that this rank has begun in its open step."""
    group_collectives: int = 0
    """Collectives within the group, of torch's default process group, since the process started."""
    in_flight: Sentence = ""
    """Collective over the groups that has begun and not ended; empty: none."""
    stacks: tuple[ThreadStack, ...] = ()
    """The main thread first."""
    children: tuple[Sentence, ...] = ()
    """Its child processes, such as workers of data loaders, one sentence each."""
    device: Sentence = ""
    """Whether its GPU works; empty: it has none."""
    recorder: Sentence = ""
    """Path of the dump of torch's flight recorder, on its machine; empty: none."""
    work: int = 0
    """Work that its stack does not show, as a number that grows: MiB that its main thread and its child processes have
    read and written, processor time of these processes in s, allocations on the GPU."""
    commits: int = 0
    """Steps that its process has committed since it started."""


def bounded(found: RankStacks) -> RankStacks:
    """Return the answer within the limits, with text that any terminal shows. It fits into a frame."""
    return replace(
        found,
        line=_short(found.line),
        waits=_short(found.waits),
        section=_short(found.section),
        in_flight=_short(found.in_flight),
        stacks=tuple(
            ThreadStack(_short(one.thread), tuple(map(_short, one.frames[-MAX_FRAMES:])))
            for one in found.stacks[:MAX_THREADS]
        ),
        children=tuple(map(_short, found.children[:MAX_CHILDREN])),
        device=_short(found.device),
        recorder=_short(found.recorder),
    )


def _short(text: str) -> str:
    return text if len(text) <= MAX_FRAME_TEXT and text.isprintable() else printable(text)[:MAX_FRAME_TEXT]


@dataclass(frozen=True, slots=True)
class Hung:
    """The group hangs. Write the stacks, and end with ``EXIT_HUNG``."""

    kind: ClassVar[str] = "hung"
    reason: Sentence
    ban_seconds: float = 0.0
    """Time for which its name is banned, because it has hung too often; 0: it may come back at once."""
