"""Read log files and check them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from keepstep_history.history import History, Report
from keepstep_history.records import files_of, lines_of, parse

LOOKED_AT = 20
"""Lines of a file after which it is clear whether it is a log."""


class NoLogsError(Exception):
    """There is nothing to check."""


def check_files(paths: Sequence[Path]) -> Report:
    """Checks the logs among ``paths``, folders looked through.

    Raises:
        OSError: a file cannot be read.
        NoLogsError: a file of ``paths`` is no log, or there is none in them.
    """
    history, left_out, read = History(), [], 0
    for log, path in files_of(paths):
        if not _is_log(path):
            if path in paths:
                raise NoLogsError(f"{path} is neither the event log of a lighthouse nor the step log of a trainer")
            left_out.append(f"{path} is no log of keepstep and was left out")
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
        raise NoLogsError(f"there is no log in {', '.join(map(str, paths))}: no file *.jsonl that keepstep wrote")
    report = history.report()
    report.not_covered += left_out
    return report


def _is_log(path: Path) -> bool:
    """Some line is a record, or there is no whole line that could have been one."""
    nothing = True
    for _, line, whole in islice(lines_of(path), LOOKED_AT):
        try:
            parse(line)
        except ValueError:
            nothing = nothing and not whole
        else:
            return True
    return nothing
