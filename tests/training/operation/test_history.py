"""``keepstep check-history`` over the logs of a real job with real faults; then over the same logs, changed by hand."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep_chaos.histories.reading import check_files
from keepstep_cli.asking.rest import Lighthouse
from tests.support.jobs.job import Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]


async def logs_of_a_hard_life(folder: Path) -> None:
    """A group is killed, the lighthouse is killed, a group is frozen until it is lost, one is evicted."""
    async with Job("--heartbeat-timeout", "1.5") as job:
        a, b, c = [await job.start(name) for name in ("a", "b", "c")]
        await job.advance(a, b, c)
        c.kill()
        await job.advance(a, b)
        await job.start("c")
        await job.advance(a, b, c)
        await job.stop_lighthouse()
        await job.start_lighthouse()
        await job.advance(a, b, c)
        b.kill(number=signal.SIGSTOP)
        await job.advance(a, c)
        b.kill(number=signal.SIGCONT)
        await job.advance(a, b, c)
        await Lighthouse(job.address, None).post("jobs", "default", "replicas", "a", "evict", reason="a test")
        assert await a.exit_codes() == [77]
        await job.start("a")
        await job.advance(a, b, c)
        shutil.copytree(job.logs, folder)


EVERY = 10
"""Of so many commits one is changed."""

FACTS = ("step", "quorum_id", "epoch", "lineage", "n")


def changes(logs: Path) -> Iterator[tuple[str, str, Path, list[str]]]:
    """Yield each change: what it changes, where, its file, and the file's lines with it.

    Every line is removed once, commits are changed in each of their facts. Not the last line that a process wrote:
    without it all looks as if the kill had come a moment earlier.
    """
    for path in sorted(logs.iterdir()):
        lines = path.read_text().splitlines(keepends=True)
        plain = [json.loads(line) for line in lines]
        for place, line in enumerate(plain):
            following = plain[place + 1] if place + 1 < len(plain) else {}
            if following.get("kind", following.get("event")) not in {None, "term", "started"}:
                yield "removed", f"line {place + 1}", path, [*lines[:place], *lines[place + 1 :]]
            if line.get("event") == "committed" and place % EVERY == 0:
                for fact in FACTS:
                    for value in {0, 1, 2, 3, 9999} - {line[fact]}:
                        changed = json.dumps({**line, fact: value}) + "\n"
                        where = f"line {place + 1} with {value}"
                        yield fact, where, path, [*lines[:place], changed, *lines[place + 1 :]]


async def test_a_real_history_is_valid_and_every_change_to_it_is_found(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    await logs_of_a_hard_life(logs)
    report = check_files([logs])
    assert report.fine, report.violations
    assert report.not_covered == []
    job = report.jobs["default"]
    assert (job.groups, job.incarnations, job.epochs) == (3, 5, 2)
    assert job.quorums >= 6

    made = Counter()
    for what, where, path, lines in changes(logs):
        whole = path.read_text()
        path.write_text("".join(lines))
        report = check_files([logs])
        named = any("begins in the middle" in sentence for sentence in report.not_covered)
        assert not report.fine or named, f"{path.name}: {what}, {where}"
        path.write_text(whole)
        made[what] += 1
    # How many commits a life has depends on the machine; each file has at least one that is changed.
    assert set(made) == {"removed", *FACTS}
    assert min(made.values()) >= 10
