"""Read log files and check them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from keepstep_chaos.histories.history import History, Report
from keepstep_chaos.histories.records import files_of, lines_of, parse

LOOKED_AT = 20
"""Number of lines that decide whether a file is a log."""


class NoLogsError(Exception):
    """No log was found."""


def check_files(paths: Sequence[Path]) -> Report:
    """Check the logs among ``paths`` and in folders of ``paths``.

    Raises:
        OSError: a file cannot be read.
        NoLogsError: a file of ``paths`` is not a log, or no log was found.
    """
    history, left_out, read = History(), [], 0
    for log, path in files_of(paths):
        if not _is_log(path):
            if path in paths:
                raise NoLogsError(f"{path} is neither the event log of a lighthouse nor the step log of a trainer")
            left_out.append(f"{path} is not a log of keepstep; skipped")
            continue
        history.begin_file(log)
        read += 1
        for place, line, whole in lines_of(path):
            try:
                record = parse(line)
            except ValueError as error:
                history.unreadable(place, str(error), whole=whole)
            else:
                history.add(place, record)
    if not read:
        raise NoLogsError(
            f"no logs in {', '.join(map(str, paths))}: expected files *.jsonl of --event-log or KEEPSTEP_STEP_LOG"
        )
    report = history.report()
    report.not_covered += left_out
    return report


def _is_log(path: Path) -> bool:
    """Whether a line of the file is a record, or no line is whole."""
    nothing = True
    for _, line, whole in islice(lines_of(path), LOOKED_AT):
        try:
            parse(line)
        except ValueError:
            nothing = nothing and not whole
        else:
            return True
    return nothing
