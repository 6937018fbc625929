"""Format the result of a check as lines of text."""

from __future__ import annotations

from keepstep_chaos.histories.history import Report
from keepstep_chaos.histories.rules import RULES


def summary_lines(report: Report) -> list[str]:
    """Return lines that summarize the logs and jobs."""
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
    """Return lines for each violation: its text, its meaning, and the lines that prove it."""
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


def report_lines(report: Report) -> list[str]:
    """Return the whole report: summary, rules, missing logs, violations, verdict."""
    lines = [*summary_lines(report), "", "checked:"]
    lines += [f"  {rule.name:<15} {rule.holds}" for rule in report.checked]
    if report.not_covered:
        lines += ["", "not covered:", *(f"  {sentence}" for sentence in report.not_covered)]
    return [*lines, "", *violation_lines(report), verdict(report)]
