"""``keepstep check-history``: reads the logs of a run and says whether all that must hold did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from keepstep_cli.asking.options import json_option


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
    from keepstep_history.reading import NoLogsError, check_files
    from keepstep_history.report import report_lines

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
        print(*report_lines(report), sep="\n")
    sys.exit(0 if report.fine else 1)
