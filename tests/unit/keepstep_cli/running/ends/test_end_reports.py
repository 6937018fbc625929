"""Reports of a launcher about ends, and its notes when its own lighthouse ends with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.running.ends import end_reports
from keepstep_cli.running.ends.end_reports import EndReports
from keepstep_cli.running.ends.last_lines import MAX_CHARACTERS
from keepstep_cli.running.supervisor_events import GroupEnded
from keepstep_lighthouse.api.order_handlers import LIMITS
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


def reports_of(folder: Path) -> EndReports:
    return EndReports(Lighthouse(f"http://127.0.0.1:{free_port()}", None), "job", folder, lambda *_: None)


async def test_a_log_whose_secrets_are_hidden_still_fits_into_a_report(tmp_path: Path) -> None:
    reports = reports_of(tmp_path)
    reports.started("r0")
    for number in range(MAX_CHARACTERS // len("bearer 0")):
        reports.line("r0", 0, f"bearer {number % 10}", error=False)
    reports.ended(GroupEnded("r0", ((0, 1),)))
    ((_, report),) = reports._reports
    assert len(report["log"]) == MAX_CHARACTERS <= LIMITS["log"]
    assert report["log"].endswith("bearer [hidden]\nbearer [hidden]")


async def test_a_new_xid_error_is_told_also_when_the_kernel_log_has_dropped_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = {7: 13, 8: 31}
    monkeypatch.setattr(end_reports, "xid_errors", lambda: (log, "read"))
    reports = reports_of(tmp_path)
    for now in ({8: 31, 900: 79}, {900: 79}, {}):
        log = now
        reports.started("r0")
        reports.ended(GroupEnded("r0", ((0, -9),)))
    assert [report["xids"] for _, report in reports._reports] == ["79", "", ""]
