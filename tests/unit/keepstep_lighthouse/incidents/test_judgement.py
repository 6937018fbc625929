"""The verdict on the end of a group, for each kind of fact."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from keepstep_lighthouse.incidents.judgement import LOCKED, RESTARTED, Around, Loss, Report, Verdict, judge, parted
from keepstep_lighthouse.quorum.presence.departures import (
    BROKEN,
    CLOSED,
    DRAINED,
    EVICTED,
    FAILED,
    HUNG,
    SILENT,
    STOPPED,
)

CLOSED_LOSS = Loss(CLOSED, "its connection ended")
SILENT_LOSS = Loss(SILENT, "it was silent for 5 s")
KILL, TERM, SEGV = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


def told(code: int, **facts: Any) -> Report:
    return Report("r1:9a7c", 0, code, **facts)


ENDS: list[tuple[str, Report | None, Loss | None, Around, Verdict, str]] = [
    (
        "an exception",
        told(1, error="ValueError: bad (train.py:12 main)"),
        CLOSED_LOSS,
        Around(),
        Verdict.SCRIPT,
        "rank 0 exited with 1; ValueError: bad (train.py:12 main)",
    ),
    ("an exit code", told(3), CLOSED_LOSS, Around(), Verdict.SCRIPT, "the script chose this exit code"),
    ("an import error, before it connected", told(1, error="ImportError: x"), None, Around(), Verdict.SCRIPT, "x"),
    ("settings that differ", told(78, said="layout"), CLOSED_LOSS, Around(), Verdict.SCRIPT, "78; layout"),
    (
        "an exception that only the lighthouse knows",
        None,
        Loss(FAILED, "the script ended with KeyError: 'x'"),
        Around(),
        Verdict.SCRIPT,
        "the script ended with KeyError: 'x'",
    ),
    (
        "an exception within a step that only the lighthouse knows",
        None,
        Loss(BROKEN, "it failed: rank 1 ended in the middle of a step with KeyError: 'x'"),
        Around(),
        Verdict.SCRIPT,
        "rank 1 ended in the middle of a step with KeyError: 'x'",
    ),
    (
        "an allocation within a step that only the lighthouse knows",
        None,
        Loss(BROKEN, "it failed: rank 0 ended in the middle of a step with MemoryError: "),
        Around(),
        Verdict.MEMORY,
        "MemoryError",
    ),
    (
        "a connection error that only the lighthouse knows",
        None,
        Loss(FAILED, "the script ended with ConnectionRefusedError: [Errno 111]"),
        Around(),
        Verdict.NETWORK,
        "could not be reached",
    ),
    ("SIGKILL from outside", told(KILL), CLOSED_LOSS, Around(), Verdict.UNKNOWN, "rank 0 was killed by SIGKILL"),
    (
        "SIGKILL by the kernel",
        told(KILL, oom_kills=1, memory="memory.events"),
        CLOSED_LOSS,
        Around(),
        Verdict.MEMORY,
        "the kernel killed a process because memory ran out (memory.events)",
    ),
    ("SIGKILL by the kernel, through a shell", told(137, oom_kills=2), None, Around(), Verdict.MEMORY, "2 processes"),
    (
        "a data loader that the kernel killed",
        told(1, error="RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", oom_kills=1),
        CLOSED_LOSS,
        Around(),
        Verdict.MEMORY,
        "DataLoader worker",
    ),
    (
        "an exception while another process of the cgroup was killed",
        told(1, error="KeyError: 'x'", oom_kills=1),
        CLOSED_LOSS,
        Around(),
        Verdict.SCRIPT,
        "KeyError",
    ),
    (
        "an allocation on a GPU",
        told(1, error="torch.OutOfMemoryError: CUDA out of memory."),
        CLOSED_LOSS,
        Around(),
        Verdict.MEMORY,
        "CUDA out of memory",
    ),
    ("a full disk", told(1, error="OSError: [Errno 28] No space"), None, Around(), Verdict.MACHINE, "No space"),
    ("an XID of the GPU", told(1, error="RuntimeError: CUDA", xids="13 79"), None, Around(), Verdict.MACHINE, "XID 79"),
    ("a hang of a GPU that fell off", told(84, xids="79"), Loss(HUNG, "it hangs"), Around(), Verdict.MACHINE, "bus"),
    ("an XID of the script", told(1, error="RuntimeError: CUDA", xids="13"), None, Around(), Verdict.SCRIPT, "CUDA"),
    ("a failed check", told(85, said="host h: disk /: full"), None, Around(), Verdict.MACHINE, "disk /: full"),
    ("a hang", told(84), Loss(HUNG, "r1 waits in train.py:8"), Around(), Verdict.SCRIPT, "waits in train.py:8"),
    ("a hang without a launcher", None, Loss(HUNG, "r1 waits"), Around(), Verdict.SCRIPT, "r1 waits"),
    (
        "a hang after which its name is banned",
        told(77),
        Loss(HUNG, "r1 waits for the third time"),
        Around(),
        Verdict.SCRIPT,
        "third",
    ),
    ("a locked interpreter", told(KILL, stopped_by=LOCKED), SILENT_LOSS, Around(), Verdict.SCRIPT, LOCKED),
    ("SIGTERM to the launcher", told(0, stopped_by="SIGTERM"), None, Around(), Verdict.PREEMPTION, "its launcher"),
    ("SIGTERM to the rank", told(TERM), CLOSED_LOSS, Around(), Verdict.PREEMPTION, "SIGTERM reached it"),
    ("SIGTERM, and it left", None, Loss(STOPPED, "SIGTERM"), Around(), Verdict.PREEMPTION, "SIGTERM reached it"),
    ("a notice of the cloud", None, Loss(DRAINED, "spot notice"), Around(), Verdict.PREEMPTION, "spot notice"),
    (
        "silence, and the same process came back",
        None,
        SILENT_LOSS,
        Around(came_back=True, host_lives=True),
        Verdict.NETWORK,
        "the same process has connected again",
    ),
    (
        "silence, and its process ended by itself",
        told(1, error="TimeoutError: no lighthouse answers"),
        SILENT_LOSS,
        Around(),
        Verdict.NETWORK,
        "its process lived on",
    ),
    ("silence of a machine", None, SILENT_LOSS, Around(), Verdict.MACHINE, "neither it nor its launcher"),
    ("silence of one process of a machine", None, SILENT_LOSS, Around(host_lives=True), Verdict.UNKNOWN, "stopped"),
    ("silence, then SIGKILL", told(KILL), SILENT_LOSS, Around(), Verdict.UNKNOWN, "was killed by SIGKILL"),
    (
        "an error of the network in the script",
        told(1, error="ConnectionResetError: [Errno 104]"),
        CLOSED_LOSS,
        Around(),
        Verdict.NETWORK,
        "could not be reached",
    ),
    ("a crash", told(SEGV), CLOSED_LOSS, Around(), Verdict.SCRIPT, "native code"),
    (
        "the third crash on one machine of several",
        told(SEGV),
        CLOSED_LOSS,
        Around(crashes_here=2, other_hosts=True),
        Verdict.MACHINE,
        "no other machine had one",
    ),
    ("crashes on the only machine", told(SEGV), None, Around(crashes_here=9), Verdict.SCRIPT, "native code"),
    (
        "crashes on several machines",
        told(SEGV),
        None,
        Around(crashes_here=2, crashes_elsewhere=1, other_hosts=True),
        Verdict.SCRIPT,
        "native code",
    ),
    ("a process that was stuck", told(70, said="stuck in x"), None, Around(), Verdict.UNKNOWN, "stuck in x"),
    ("no launcher", None, CLOSED_LOSS, Around(), Verdict.UNKNOWN, "no launcher told"),
    (
        "a rank of its group was silent",
        told(75),
        Loss(BROKEN, "it failed: rank 1"),
        Around(),
        Verdict.UNKNOWN,
        "rank 1",
    ),
]


@pytest.mark.parametrize(
    ("report", "loss", "around", "verdict", "words"), [one[1:] for one in ENDS], ids=[one[0] for one in ENDS]
)
def test_the_verdict_and_its_evidence(
    report: Report | None, loss: Loss | None, around: Around, verdict: Verdict, words: str
) -> None:
    judged = judge(report, loss, around)
    assert judged is not None
    assert judged.verdict is verdict
    assert words in "; ".join(judged.evidence)
    assert judged.evidence == tuple(dict.fromkeys(judged.evidence)), "no sentence stands twice"


@pytest.mark.parametrize(
    ("report", "loss"),
    [
        (told(0, stopped_by="SIGINT"), Loss(STOPPED, "SIGTERM")),
        (told(TERM, stopped_by=RESTARTED), CLOSED_LOSS),
        (told(77), Loss(EVICTED, "evicted by ann")),
        (None, Loss(EVICTED, "evicted by ann")),
        (told(77), None),
        (told(80), None),
    ],
)
def test_an_end_that_was_ordered_is_no_incident(report: Report | None, loss: Loss | None) -> None:
    assert judge(report, loss, Around()) is None


def test_the_ends_of_the_other_ranks_stand_beside_the_cause() -> None:
    judged = judge(told(KILL, others="rank 1 exited with 75"), None, Around())
    assert judged is not None
    assert judged.evidence[0] == "rank 0 was killed by SIGKILL: rank 1 exited with 75"


@pytest.mark.parametrize(
    ("cause", "reason", "verdict"),
    [
        ("cut", "r1 and r2 cannot reach each other", Verdict.NETWORK),
        ("own", "r1 fails by itself: RuntimeError: NCCL", Verdict.MACHINE),
        ("own", "r1 fails by itself: torch.OutOfMemoryError: CUDA", Verdict.MEMORY),
        ("heal", "2 heals of r1 failed in a row: no progress", Verdict.UNKNOWN),
    ],
)
def test_a_group_that_is_parted_has_a_verdict(cause: str, reason: str, verdict: Verdict) -> None:
    judged = parted(cause, reason)
    assert judged.verdict is verdict
    assert judged.evidence[0] == reason
