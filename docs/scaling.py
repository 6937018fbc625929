"""Compute the tables of goodput in ``docs/scaling.md``, and write them into the page.

The seconds of a failure are measured ones (``benchmarks/README.md``), except those that ``ASSUMED`` lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("scaling.md")
JOBS = ((16, 8), (128, 8), (1_024, 8), (8_192, 64), (16_384, 64), (100_000, 64))
"""GPUs of a job, and of one group."""

# ---- measured, in seconds
PAUSE = 0.05
"""SIGKILL to the next commit of the others, three groups."""
LEAVE, JOIN = 0.62 / 1024, 0.17 / 1024
"""For each group, from 1,024 groups on two cores: until the last one has an answer without, and with, another group."""
HANG = 5.0
"""SIGSTOP to the next commit, in place of ``PAUSE``: a process that hangs closes no connection."""
HEAL_BYTES_PER_SECOND = 7.93e9
"""One rank, direct, verified, over loopback."""

# ---- assumed
GPU_HOURS = {"Llama 3": 54 * 24 * 16_384 / 419, "FT-HSDP": 100_000 * 10 / 60 / (1 - 0.44)}
"""Between two failures of one GPU: 419 in 54 days on 16,384; and 44 % of the time useful with a stall of 10 minutes for
each, on 100,000."""
STATE_BYTES = 40e9
"""Of one GPU: weights and optimizer."""
CONNECT = 0.005
"""Seconds of a new process group, for each group of the job."""
STEP = 10.0
REPLACE = 600.0
"""Seconds until another host has taken the place of a lost one."""


@dataclass(frozen=True)
class Loss:
    """Seconds that a failure costs. ``waiting``: all groups; ``missing``: one group."""

    waiting: float
    missing: float

    def goodput(self, mean: float, groups: int) -> float:
        """Return the share of the samples that is left with ``mean`` seconds between two failures."""
        return mean / (mean + self.waiting) * (1 - min(1.0, self.missing / (mean * groups)))


def loss(groups: int, away: float, notice: float = PAUSE) -> Loss:
    """Return the loss of one failure.

    The others wait until they know of the loss, for two new process groups, and for the heal of the group that returns.
    That group misses the step of its failure and the step of its heal, and those while it is away.

    Args:
        groups: of the job.
        away: seconds until a process is ready to take the place.
        notice: seconds until the others know of the loss.
    """
    heal = STATE_BYTES / HEAL_BYTES_PER_SECOND
    return Loss(notice + groups * (LEAVE + JOIN + 2 * CONNECT) + heal, away + 2 * STEP)


def duration(seconds: float) -> str:
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def table(rows: Iterable[tuple[str, Iterable[str]]]) -> str:
    return "\n".join(f"| {' | '.join((name, *cells))} |" for name, cells in rows)


def by_size() -> str:
    """Return the table of jobs from 16 to 100,000 GPUs."""
    groups = [gpus // size + (gpus % size > 0) for gpus, size in JOBS]
    means = [GPU_HOURS["Llama 3"] * 3600 / gpus for gpus, _ in JOBS]
    jobs = list(zip(means, groups, strict=True))
    return table(
        [
            ("GPUs", [f"{gpus:,}" for gpus, _ in JOBS]),
            ("---", ["---"] * len(JOBS)),
            ("groups", [f"{count:,} of {size}" for count, (_, size) in zip(groups, JOBS, strict=True)]),
            ("mean time between failures", map(duration, means)),
            ("all wait, for each failure", [f"{loss(count, 0).waiting:.1f} s" for count in groups]),
            ("goodput, a spare stands by", [f"{loss(count, 0).goodput(mean, count):.4f}" for mean, count in jobs]),
            ("another host after 10 min", [f"{loss(count, REPLACE).goodput(mean, count):.4f}" for mean, count in jobs]),
            (
                "the same, each failure a hang",
                [f"{loss(count, REPLACE, HANG).goodput(mean, count):.4f}" for mean, count in jobs],
            ),
        ]
    )


def beside_published() -> str:
    """Return the table of published figures, beside keepstep at the same rate of failures."""
    often = GPU_HOURS["FT-HSDP"] * 3600 / 100_000

    def row(name: str, mean: float, published: str, groups: int) -> tuple[str, list[str]]:
        ours = [f"{loss(groups, away).goodput(mean, groups):.3f}" for away in (0, REPLACE)]
        return name, [duration(mean), published, *ours]

    return table(
        [
            ("published by", ["mean time", "published", "a spare stands by", "another host after 10 min"]),
            ("---", ["---"] * 4),
            row("MoEvement; here 16 groups of 8", 600, "0.94", 16),
            row("the same; here 128 groups of 8", 600, "0.94", 128),
            row("FT-HSDP, 100,000 GPUs", often, "0.80; synchronous 0.44", 1563),
        ]
    )


def written(page: str) -> str:
    """Return the page with its tables as computed now. A table replaces the one that has the same head."""
    lines = page.splitlines()
    for new in (by_size().splitlines(), beside_published().splitlines()):
        begin = lines.index(new[0])
        end = next(at for at in range(begin, len(lines)) if not lines[at].startswith("|"))
        lines[begin:end] = new
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
