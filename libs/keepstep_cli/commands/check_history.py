"""``keepstep check-history``: reads the logs of a run and says whether all that must hold did."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keepstep_cli.asking.options import json_option

if TYPE_CHECKING:
    from keepstep_history.history import Report

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
    from keepstep_history.history import History
    from keepstep_history.records import files_of, lines_of, parse

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
    from keepstep_history.records import lines_of, parse

    nothing = True
    for _, line, whole in islice(lines_of(path), LOOKED_AT):
        try:
            parse(line)
        except ValueError:
            nothing = nothing and not whole
        else:
            return True
    return nothing


def summary_lines(report: Report) -> list[str]:
    """What was read, as people say it."""
    logs = f"{_count(report.event_logs, 'event log')} and {_count(report.step_logs, 'step log')}"
    lines = [f"read {logs}: {_count(report.records, 'record')}, {_count(report.epochs, 'epoch')}"]
    for name, job in report.jobs.items():
        again = f", {job.steps_again} of them again by a later quorum" if job.steps_again else ""
        lines.append(
            f"job {name}: {_count(job.groups, 'group')} in {_count(job.incarnations, 'incarnation')}, "
            f"{_count(job.quorums, 'quorum')} under {_count(job.epochs, 'epoch')}, "
            f"{_count(job.steps, 'step')} committed{again}"
        )
    return lines


def verdict(report: Report) -> str:
    if report.fine:
        return "no violation"
    rules = ", ".join(f"{rule} ({number})" for rule, number in report.counts.items())
    return f"{_count(report.counts.total(), 'violation')}: {rules}"


def violation_lines(report: Report) -> list[str]:
    """Each violation, what it means, and the lines that prove it."""
    from keepstep_history.rules import RULES

    lines = []
    for one in report.violations:
        of_job = f", job {one.job}" if one.job else ""
        lines += [f"VIOLATION ({one.rule}{of_job}): {one.what}", f"  that is: {RULES[one.rule].meaning}"]
        lines += [f"  {place}" for place in one.records]
    kept = len(report.violations)
    if report.counts.total() > kept:
        lines.append(f"and {report.counts.total() - kept} more like these; the first of each rule are shown")
    return lines


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


@click.command("check-history", short_help="Check the logs of a run for what must never happen.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@json_option
def check_history(paths: tuple[Path, ...], *, as_json: bool) -> None:
    """Check the logs of a run: was there ever a step that two quorums counted, a leader that was not the leader?

    PATH is a log or a folder with logs (*.jsonl, *.jsonl.1 ...). Give those of all lighthouses (--event-log, or
    events.jsonl in the --state-dir) and all trainers (KEEPSTEP_STEP_LOG) of one run, each once. Whatever is missing is
    named, and the rest is checked. Logs that were cut off by a kill are fine. Clocks need not agree.

    Exit code: 0 all that must hold did, 1 it did not (each violation is named, with the lines that prove it), 2 there
    is nothing to read.
    """
    try:
        report = check_files(paths)
    except OSError as error:
        raise click.UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    except NoLogsError as error:
        raise click.UsageError(
            f"{error}. A lighthouse writes one with --event-log FILE, a trainer with KEEPSTEP_STEP_LOG=FILE"
        ) from error
    if as_json:
        print(json.dumps(report.json(), indent=2))
    else:
        _print(report)
    sys.exit(0 if report.fine else 1)


def _print(report: Report) -> None:
    from keepstep_history.rules import RULES

    for line in [*summary_lines(report), "", "checked:"]:
        print(line)
    for rule in RULES.values():
        print(f"  {rule.name:<15} {rule.holds}")
    if report.not_covered:
        print("\nnot covered:")
        for sentence in report.not_covered:
            print(f"  {sentence}")
    print()
    for line in [*violation_lines(report), verdict(report)]:
        print(line)
