"""``keepstep check-history``: check the logs of a run for violations."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from keepstep_cli.asking.options import json_option


@click.command("check-history", short_help="Check the logs of a run for violations.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@json_option
def check_history(paths: tuple[Path, ...], *, as_json: bool) -> None:
    """Check the logs of a run for violations, such as a step of two quorums or a decision of a replaced leader.

    PATH is a log, or a folder with logs (*.jsonl, *.jsonl.1 ...). Pass the logs of all lighthouses (--event-log, or
    events.jsonl in the --state-dir) and all trainers (KEEPSTEP_STEP_LOG) of one run, each once. The report names
    missing logs. A last line that a kill cut off is no violation. Clocks need not agree.

    Exit code: 0 no violation, 1 violations (each with the lines that prove it), 2 no log to read.
    """
    from keepstep_chaos.histories.reading import NoLogsError, check_files
    from keepstep_chaos.histories.report import report_lines

    try:
        report = check_files(paths)
    except OSError as error:
        raise click.UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    except NoLogsError as error:
        raise click.UsageError(
            f"{error}. A lighthouse writes a log with --event-log FILE, a trainer with KEEPSTEP_STEP_LOG=FILE"
        ) from error
    if as_json:
        print(json.dumps(report.json(), indent=2))
    else:
        print(*report_lines(report), sep="\n")
    sys.exit(0 if report.fine else 1)
