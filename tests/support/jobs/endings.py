"""Kill groups in the last steps of a training that all groups finish together."""

from __future__ import annotations

import time
from functools import partial
from random import Random
from typing import Any

from tests.support.jobs.job import Group, Job

LAST_STEP = 8
KILLS = 5
"""One in each of the last steps, except in a step that one group committed and another discarded."""


async def finish_under_kills(job: Job, name: str, random: Random) -> float:
    """Train four groups as the job ``name``. SIGKILL a random one in each of the last steps, and start it again.

    One group is spared, because a job that loses all groups at once begins again. It waits for each kill. Fail if a
    group ends with other weights, or with an error.

    Returns:
        Seconds from the last kill until all have ended.
    """
    pauses = ",".join(str(step) for step in range(LAST_STEP - KILLS, LAST_STEP))
    file = job.directory / name
    settings: dict[str, Any] = {"KEEPSTEP_JOB": name, "NUM_REPLICA_GROUPS": "4"}
    settings |= {"TRAINER_FINISH": "1", "TRAINER_STEPS": str(LAST_STEP)}
    spared = await job.start("a", TRAINER_PAUSE_AT=pauses, TRAINER_PAUSE_FILE=str(file), **settings)
    others = [await job.start(group, **settings) for group in "bcd"]
    kills, killed = 0, 0.0
    while True:
        await job.until(partial(_waits_or_has_ended, spared, kills), "another pause, or the end")
        if _steps(spared, "finished"):
            break
        victim = random.choice(others)
        victim.kill()
        killed = time.monotonic()
        await job.start(victim.name, **settings)
        file.with_name(f"{name}-{_steps(spared, 'paused')[kills]}").touch()
        kills += 1
    assert kills >= KILLS - 1, f"{kills} kills\n{job.report()}"
    groups = [spared, *others]
    codes = [await group.exit_codes() for group in groups]
    assert codes == [[0]] * 4, f"{codes}\n{job.report()}"
    ends = {_end_of(group) for group in groups}
    assert len(ends) == 1, f"{ends}\n{job.report()}"
    (end,) = ends
    assert end[:2] == (LAST_STEP, 4), f"{end}\n{job.report()}"
    return time.monotonic() - killed


def _waits_or_has_ended(group: Group, kills: int) -> bool:
    return len(_steps(group, "paused")) > kills or bool(_steps(group, "finished"))


def _steps(group: Group, event: str) -> list[int]:
    return [line["step"] for line in group.lines if line["event"] == event]


def _end_of(group: Group) -> tuple[int, int, str]:
    """Return the step, the number of groups, and the digest with which the newest process of ``group`` finished."""
    pid = group.ranks[0].pid
    (end,) = [line for line in group.lines if (line["event"], line["pid"]) == ("finished", pid)]
    return end["step"], end["groups"], end["digest"]
