"""Judge the measurements of a machine. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep_mesh.text import bytes_text, printable, seconds_text

WARN_OFFSET_SECONDS = 0.1
FAIL_OFFSET_SECONDS = 5.0
"""Beyond this, bans and the times of events are wrong for people. No decision on a quorum depends on clocks."""
MAX_SHOWN = 200
"""Limit of the last line of a command, in characters."""
BAD_XIDS = {
    48: "uncorrectable error of the memory",
    64: "a row of the memory cannot be remapped",
    74: "error of NVLink",
    79: "the GPU has fallen off the bus",
    95: "uncontained error of the memory",
    119: "the processor of the GPU does not answer",
}
"""XID errors that a program cannot cause. Others, such as 13 and 31, may be faults of a script."""


class Verdict(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def of_clock(address: str, offset_seconds: float, round_trip: float) -> Finding:
    """Judge the clock of the service at ``address``: its time minus ours, and the round trip of the question."""
    offset = abs(offset_seconds)
    direction = "ahead of" if offset_seconds > 0 else "behind"
    check = f"clock of {address}"
    if offset <= max(WARN_OFFSET_SECONDS, round_trip):
        return Finding(check, Verdict.OK, f"within {seconds_text(max(offset, round_trip / 2))}")
    verdict = Verdict.FAIL if offset > FAIL_OFFSET_SECONDS else Verdict.WARN
    found = f"{seconds_text(offset)} {direction} this machine"
    return Finding(check, verdict, found, "run NTP or chrony on both machines; times in events are wrong")


def of_memory(available: int, least: int) -> Finding:
    """Judge the main memory that is available, in bytes."""
    return _of_room("memory", available, least, "available", "end other programs, or raise the limit of the container")


def of_disk(folder: str, free: int | None, least: int, problem: str = "") -> Finding:
    """Judge the free bytes of the file system of ``folder``. ``free`` None: it cannot be used, for ``problem``."""
    check = f"disk {folder}"
    if free is None:
        return Finding(check, Verdict.FAIL, problem, "mount it, and allow this user to write there")
    return _of_room(check, free, least, "free", "delete files there")


def _of_room(check: str, found: int, least: int, what: str, advice: str) -> Finding:
    if found < least:
        return Finding(check, Verdict.FAIL, f"{bytes_text(found)} {what} (at least {bytes_text(least)})", advice)
    return Finding(check, Verdict.OK, f"{bytes_text(found)} {what}")


def of_rate(peer: str, rate: float | None, least: float, problem: str = "") -> Finding:
    """Judge the bytes per second to ``peer``. ``rate`` None: it was not measured, for ``problem``."""
    check = f"bandwidth to {peer}"
    if rate is None:
        return Finding(check, Verdict.WARN, f"not measured: {problem}")
    if rate < least:
        found = f"{bytes_text(rate)}/s (at least {bytes_text(least)}/s)"
        return Finding(check, Verdict.FAIL, found, "look at the link, its cable, and other traffic")
    return Finding(check, Verdict.OK, f"{bytes_text(rate)}/s")


def of_command(command: str, code: int | None, last_line: str, limit_seconds: float) -> Finding:
    """Judge the end of an own command. ``code`` None: it ran longer than the limit."""
    check = f"command {printable(command)[:MAX_SHOWN]}"
    said = printable(last_line.strip())[:MAX_SHOWN]
    if code == 0:
        return Finding(check, Verdict.OK, said or "exit code 0")
    ended = f"did not end within {limit_seconds:g} s" if code is None else f"exit code {code}"
    return Finding(check, Verdict.FAIL, f"{ended}{f': {said}' if said else ''}", "repair what the command checks")


def of_endpoint(url: str, status: int | None, said: str) -> Finding:
    """Judge the answer of an HTTP endpoint. ``status`` None: none came, for the reason ``said``."""
    said = printable(said.strip())[:MAX_SHOWN]
    if status is not None and 200 <= status < 300:
        return Finding(url, Verdict.OK, str(status))
    found = f"no answer: {said}" if status is None else f"status {status}{f': {said}' if said else ''}"
    return Finding(url, Verdict.FAIL, found, "repair what the endpoint checks")


def of_product(wrong: int, device: str) -> Finding:
    """Judge a matrix product whose result is known. ``wrong``: number of bytes that differ from it."""
    check = f"matrix product on {device}"
    if wrong:
        return Finding(check, Verdict.FAIL, f"{wrong} bytes are wrong", "take the machine out, and test its processor")
    return Finding(check, Verdict.OK, "correct bit for bit")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What NVML says about a GPU. None: the GPU or its driver does not have it."""

    name: str
    uncorrected: int | None = None
    """Uncorrectable errors of its memory since the driver was loaded."""
    remap_pending: bool | None = None
    """Rows of its memory are remapped at the next reset."""
    remap_failed: bool | None = None
    links_down: int | None = None
    """Number of NVLinks that are not active; None: it has none."""
    bandwidth: float | None = None
    """Bytes per second of its memory at its highest clock."""


def of_gpu(facts: GpuFacts) -> list[Finding]:
    """Judge the counters of a GPU, and name those that it does not have."""
    counters = {
        "ECC counters": facts.uncorrected,
        "remapped rows": facts.remap_failed,
        "NVLink": facts.links_down,
        "memory bandwidth": facts.bandwidth,
    }
    missing = [name for name, value in counters.items() if value is None]
    problems, found = [], []
    if facts.uncorrected:
        problems.append(f"{facts.uncorrected} uncorrectable errors of its memory")
    if facts.remap_failed:
        problems.append("a row of its memory could not be remapped")
    elif facts.remap_pending:
        problems.append("rows of its memory wait for a reset to be remapped")
    if facts.links_down:
        found.append(f"{facts.links_down} NVLinks are not active")
    if facts.bandwidth is not None:
        found.append(f"memory of {bytes_text(facts.bandwidth)}/s")
    there = f"not there: {', '.join(missing)}" if missing else "no errors"
    if problems:
        return [Finding(facts.name, Verdict.FAIL, "; ".join(problems), "reset the GPU, or take the machine out")]
    if facts.links_down:  # also a bridge that was never there
        return [Finding(facts.name, Verdict.WARN, ", ".join([*found, there]), "look at its NVLink bridges")]
    return [Finding(facts.name, Verdict.OK, ", ".join([*found, there]))]


def of_xids(xids: Sequence[int] | None) -> Finding:
    """Judge the XID errors of the kernel log since the machine started. None: the log may not be read."""
    if xids is None:
        return Finding("XID errors", Verdict.OK, "not there: this user may not read the kernel log")
    bad = sorted(set(xids) & set(BAD_XIDS))
    if bad:
        found = ", ".join(f"{one} ({BAD_XIDS[one]})" for one in bad)
        return Finding("XID errors", Verdict.FAIL, found, "reset the GPU, or take the machine out")
    return Finding("XID errors", Verdict.OK, f"none of the hardware{f', {len(xids)} others' if xids else ''}")


def sentence(findings: Sequence[Finding]) -> str:
    """Return the checks that failed, with what was found and what to do."""
    failed = [one for one in findings if one.verdict is Verdict.FAIL]
    return "; ".join(f"{one.check}: {one.found}; {one.advice}" for one in failed)
