"""Notes of a launcher about the last ends, when its own lighthouse ends with it."""

from __future__ import annotations

from pathlib import Path

from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.running.ends.end_reports import EndReports
from keepstep_cli.running.supervisor_events import GroupEnded
from keepstep_mesh.exit_codes import EXIT_JOB_CLOSED
from tests.support.network.ports import free_port

ERROR = (
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 7, in main',
    '    raise ValueError("bad batch")',
    "ValueError: bad batch",
)


async def test_ends_whose_verdict_never_came_are_noted_with_what_the_launcher_knows(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    nobody = Lighthouse(f"http://127.0.0.1:{free_port()}", None)
    reports = EndReports(nobody, "job", tmp_path, lambda group, sentence: said.append((group, sentence)))
    for group in ("r0", "r1", "r2", "r3"):
        reports.started(group)
        for line in ERROR:
            reports.line(group, 1, line, error=True)
    reports.ended(GroupEnded("r0", ((1, 1), (0, -15))))
    reports.ended(GroupEnded("r1", ((1, 1), (0, -15))))
    reports.told("r1")
    reports.ended(GroupEnded("r2", ((0, -15), (1, -15)), stopped_by="SIGTERM"))
    reports.started("r3")
    reports.ended(GroupEnded("r3", ((0, -9),)))
    reports.started("r4")
    reports.ended(GroupEnded("r4", ((0, EXIT_JOB_CLOSED),)))
    await reports.close()
    assert [group for group, _ in said] == ["r0", "r3"]
    assert said[0][1] == (
        "why it ended, as far as this machine knows: rank 1 exited with 1; rank 0 was killed by SIGTERM; "
        "ValueError: bad batch (train.py:7 main)"
    )
    assert said[1][1] == "why it ended, as far as this machine knows: rank 0 was killed by SIGKILL"
