"""Answer a request for the stacks of this rank, and end the process if the lighthouse finds that its group hangs.

The event-loop thread reads the stacks; it lives while the training thread hangs. A thread of its own asks for facts
that may block on a dead file system or driver (source lines, child processes, the GPU, torch). They are left out if
they come too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.runtime.exits import end_process
from keepstep.stacks.activity import Activity
from keepstep.stacks.child_processes import child_processes, kill_children, work_done
from keepstep.stacks.thread_stacks import script_line, shown_line, thread_stacks, waits_for, waits_for_children
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.exit_codes import EXIT_HUNG
from keepstep_mesh.protocol.stack_messages import Hung, RankStacks, StacksRequest, bounded
from keepstep_mesh.threads.dumped_stacks import accept_signal
from keepstep_mesh.threads.starting import Thread

log = get_logger("keepstep.stacks")

SLOW_FACTS_SECONDS = 2.0
"""Limit of the facts that may block."""
PASS_ON_SECONDS = 0.3
"""Time in which rank 0 passes the order to end on to the other ranks."""
MAX_WHOLE = 2**62
IS_BUSY = "has work that has not ended"


class StackReporter:
    """Acts on the messages about stacks. All methods except ``__init__`` run on the event loop.

    Args:
        rank: within the group.
        activity: of the training thread.
    """

    def __init__(self, rank: int, activity: Activity) -> None:
        self.send: Callable[[RankStacks], None] | None = None
        """Sends an answer; None: the link is not built yet."""
        self._rank = rank
        self._activity = activity
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._children: tuple[str, ...] = ()
        """As in the last answer."""
        self._facts: dict[str, Any] = {}
        """Facts that may block, as they were last found."""
        self._finding: Thread | None = None
        accept_signal()

    def start(self, send: Callable[[RankStacks], None]) -> None:
        """Answer from now on."""
        self.send = send

    def on_push(self, push: object) -> bool:
        """Act on a push. Return whether it is about stacks."""
        match push:
            case StacksRequest(number):
                if not self._asking:  # else the last answer still comes
                    self._asking[number] = task = asyncio.ensure_future(self._answer(number))
                    task.add_done_callback(lambda _: self._asking.pop(number, None))
            case Hung(reason):
                asyncio.get_running_loop().call_later(PASS_ON_SECONDS, _end, reason, self._children)
            case _:
                return False
        return True

    async def _answer(self, number: int) -> None:
        activity, now = self._activity, time.monotonic()
        stacks, frame = thread_stacks(activity.training_thread)
        found, waits, section, progress = script_line(frame), waits_for(frame), activity.current, activity.progress()
        with_children = waits_for_children(frame)
        del frame
        facts = await self._slow_facts(found, with_children=with_children)
        self._children = facts.get("children", ())
        answer = RankStacks(
            number=number,
            rank=self._rank,
            line=facts.get("line") or _plain_line(found),
            waits=waits,
            section="" if section is None else section.name,
            section_ms=0 if section is None else round((now - section.began) * 1000),
            section_limit_ms=0 if section is None else _whole(section.limit * 1000),
            step=progress.step,
            collectives=progress.collectives,
            group_collectives=_whole(facts.get("group_collectives", 0)),
            in_flight=progress.in_flight,
            stacks=stacks,
            children=self._children,
            device=facts.get("device", ""),
            recorder=facts.get("recorder", ""),
            work=facts.get("work", 0) + facts.get("allocations", 0),
            commits=activity.commits,
        )
        if self.send is not None:
            self.send(bounded(answer))

    async def _slow_facts(
        self, found: tuple[str, int, str, dict[str, object]] | None, *, with_children: bool
    ) -> dict[str, Any]:
        if self._finding is not None and self._finding.is_alive():  # a file system or a driver is dead
            return {**self._facts, "line": ""}
        facts: dict[str, Any] = {}
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        wanted: dict[str, Callable[[], Any]] = {
            "work": functools.partial(work_done, self._activity.native_id, with_children=with_children),
            "group_collectives": _group_collectives,
            "line": functools.partial(shown_line, found),
            "children": child_processes,
            "allocations": _allocations,
            "device": _device,
            "recorder": _recorder,
        }

        def ask() -> None:
            for name, question in wanted.items():
                try:
                    facts[name] = question()
                except Exception as error:  # noqa: BLE001  a fact less, and the others are worth having
                    log.debug("a fact about this rank cannot be had", fact=name, error=repr(error))
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done.set)

        try:
            self._finding = Thread(target=ask, name="keepstep-stacks", daemon=True)
            self._finding.start()
            await asyncio.wait_for(done.wait(), SLOW_FACTS_SECONDS)
        except (TimeoutError, RuntimeError, MemoryError):
            log.info("some facts about this rank take too long, and are left out", known=sorted(facts))
        self._facts = dict(facts)
        return self._facts


def _end(reason: str, children: tuple[str, ...]) -> None:
    kill_children()
    shown = "".join(f"\nchild process: {one}" for one in children)
    end_process(f"this group hangs: {reason}{shown}", EXIT_HUNG, stacks=True)


def _whole(value: float) -> int:
    """Return the value as a message may have it: torch's counters and limits of sections are not ours."""
    return round(min(max(value, 0), MAX_WHOLE))


def _plain_line(found: tuple[str, int, str, dict[str, object]] | None) -> str:
    return "" if found is None else f"{found[0].rpartition('/')[2]}:{found[1]} {found[2]}"


def _torch_groups() -> dict[Any, Any]:
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    return {} if torch is None else dict(torch._world.pg_map)  # noqa: SLF001  torch has no public name for its groups


def _group_collectives() -> int:
    """Return the number of collectives of torch's process groups, in all, in this process."""
    return sum(one._get_sequence_number_for_group() for one in _torch_groups())  # noqa: SLF001


def _used_gpus() -> list[int]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return [one for one in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(one)]


def _device() -> str:
    used = _used_gpus()
    if used:
        importlib.import_module("keepstep.runtime.devices").begin_gpu_thread(used[0])
    idle = {one: sys.modules["torch"].cuda.default_stream(one).query() for one in used}
    return ", ".join(f"GPU {one} {'is idle' if is_idle else IS_BUSY}" for one, is_idle in idle.items())


def _allocations() -> int:
    return sum(sys.modules["torch"].cuda.memory_stats(one).get("allocation.all.allocated", 0) for one in _used_gpus())


def _recorder() -> str:
    """Write torch's flight recorder to a file, if it records: with NCCL and ``TORCH_FR_BUFFER_SIZE``."""
    size = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    if not size or size == "0" or "nccl" not in str(list(_torch_groups().values())):
        return ""
    torch = importlib.import_module("torch._C._distributed_c10d")
    dump = torch._dump_nccl_trace  # noqa: SLF001  without a public name, and only in builds with NCCL
    path = Path(tempfile.gettempdir()) / f"keepstep-flight-recorder-{os.getpid()}"
    path.unlink(missing_ok=True)  # and not write through a link, or into a file, that another user has put there
    with path.open("xb") as file:
        try:
            file.write(dump(includeCollectives=True, includeStackTraces=False, onlyActive=True))
            file.flush()
        except OSError:  # the disk is full
            path.unlink()
            raise
    return str(path)
