"""Aborts of collectives and of ``configure`` whose peer died, stands still, or never comes."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

from keepstep.process_group import ProcessGroup, ProcessGroupAbortedError, ProcessGroupError
from tests.gpu.check import Check, Result
from tests.gpu.rank import Rank

FREED_SECONDS = 1.0
"""Limit from the abort until the training thread has the error."""
IN_FLIGHT_SECONDS = 0.5
"""Time for a collective to begin on the device: a kernel that waits for its peer sends no event."""
WATCHDOG_SECONDS = 75.0
"""torch's watchdog ends a process about 60 s after a peer of its communicator died."""


def abort_in_flight(rank: Rank, fate: str) -> Result | None:
    group = rank.process_group()
    rank.configure(group, 1)
    tensor = rank.full(1)
    group.allreduce([tensor]).wait()
    assert group.errored() is None
    rank.meet("works")
    if rank.index == 1:
        rank.await_told("in flight")
        if fate != "never came":
            os.kill(os.getpid(), signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
        rank.await_told("over")
        return None
    value = rank.full(1)
    work = group.allreduce([value])
    rank.tell("in flight")
    time.sleep(IN_FLIGHT_SECONDS)  # a kernel that waits for its peer sends no event
    began = time.monotonic()
    group.abort("rank 1 was lost")
    failure: Exception | None = None
    try:
        work.wait()
    except (ProcessGroupError, TimeoutError) as error:
        failure = error
    failure = group.errored() or failure
    seconds = time.monotonic() - began
    rank.tell("over")
    assert isinstance(failure, ProcessGroupError), f"no result may pass for one: {failure!r}"
    assert seconds < FREED_SECONDS, f"free after {seconds:.2f} s (limit {FREED_SECONDS:g} s)"
    _works_alone(rank, group)
    return {"freed, s": round(seconds, 3)}


def _works_alone(rank: Rank, group: ProcessGroup) -> None:
    """The next quorum of a survivor works."""
    rank.configure(group, 2, [rank.index])
    tensor = rank.full(3)
    group.allreduce([tensor]).wait()
    assert group.errored() is None
    assert tensor[0].item() == 3


def abort_configure(rank: Rank) -> Result | None:
    group = rank.process_group()
    if rank.index == 1:
        rank.await_told("over")
        return None
    raised: list[Exception] = []

    def configure() -> None:
        try:
            rank.configure(group, 1)
        except ProcessGroupError as error:
            raised.append(error)

    thread = threading.Thread(target=configure, daemon=True)
    thread.start()
    thread.join(2 * IN_FLIGHT_SECONDS)  # by then it waits in C++, without an event
    assert thread.is_alive(), "it does not wait for its peer"
    began = time.monotonic()
    group.abort("rank 1 was lost")
    thread.join(10 * FREED_SECONDS)
    seconds = time.monotonic() - began
    rank.tell("over")
    assert raised, f"still in configure {seconds:.1f} s after the abort"
    assert isinstance(raised[0], ProcessGroupAbortedError), repr(raised[0])
    assert seconds < FREED_SECONDS, f"free after {seconds:.2f} s (limit {FREED_SECONDS:g} s)"
    _works_alone(rank, group)
    return {"freed, s": round(seconds, 3)}


def outlive_the_watchdog(rank: Rank) -> Result | None:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun sets it
    found = abort_in_flight(rank, "killed")
    time.sleep(WATCHDOG_SECONDS)  # the end of this process would come within that time
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1", "the user's own groups keep their setting"
    return found


_FATES = {
    "killed": ("abort_killed", "was killed"),
    "stopped": ("abort_stopped", "stands still"),
    "never came": ("abort_missing", "never begins it"),
}
CHECKS = (
    *(
        Check(
            name,
            f"An abort frees a collective whose peer {what}, within {FREED_SECONDS:g} s; the next quorum works.",
            partial(abort_in_flight, fate=fate),
            lost=frozenset({1}) if fate != "never came" else frozenset(),
        )
        for fate, (name, what) in _FATES.items()
    ),
    Check("abort_configure", "An abort frees a configure that waits for its peer.", abort_configure),
    Check(
        "watchdog",
        "No watchdog of torch ends a process whose peer died, also under torchrun.",
        outlive_the_watchdog,
        seconds=WATCHDOG_SECONDS + 60.0,
        needs_gpu="Gloo has no watchdog",
        sleeps=True,
        lost=frozenset({1}),
    ),
)
