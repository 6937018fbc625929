"""The dashboard, Prometheus, traces and the documents use one name for one thing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import yaml

from keepstep.step.reporting import scalars
from keepstep_mesh.config import variables
from keepstep_mesh.protocol.telemetry_records import StepRecord
from keepstep_mesh.telemetry.tracing.spans import LOGS, SPAN_GROUPS
from keepstep_metrics.history.findings.goodput import BADPUT, badput
from keepstep_metrics.history.timeseries.timeline import LIVING, State

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "services" / "keepstep_metrics" / "dashboard"
METRICS, TELEMETRY = ((ROOT / "docs" / name).read_text() for name in ("metrics.md", "telemetry.md"))
SHOWN = [state.value for state in State if state is not State.GONE]


def rows(page: str, heading: str) -> list[str]:
    """Return the names in the first column of the table below a heading, of which the end is given."""
    section = re.split(rf"^##+ .*{heading}$", page, maxsplit=1, flags=re.MULTILINE)[1].partition("\n#")[0]
    return [
        name for line in re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE) for name in re.findall("`([^`]+)`", line)
    ]


def test_states_have_the_same_names_on_the_page_and_in_the_documents() -> None:
    listed = re.search(r"STATES = \[(.*?)\]", (PAGE / "words.js").read_text(), re.DOTALL)
    assert listed is not None
    assert sorted(re.findall(r'"(\w+)"', listed[1])) == sorted(SHOWN)
    assert sorted(rows(METRICS, "a group does")) == sorted(SHOWN)


def test_alerts_of_the_page_are_those_of_prometheus_and_of_the_documents() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())["groups"]
    rules = {rule["alert"] for group in groups for rule in group["rules"]}
    of_the_page = set(re.findall(r'add\([`"]([A-Z]\w+)', (PAGE / "cluster.js").read_text()))
    assert of_the_page - rules == set()
    assert set(rows(METRICS, "Alerts")) <= rules
    assert all(f"`{name}`" in METRICS for name in of_the_page)


def test_spans_and_scalars_have_the_names_of_records_and_of_the_documents() -> None:
    assert rows(TELEMETRY, "Traces")[: len(SPAN_GROUPS)] == list(SPAN_GROUPS)
    assert all(f"`{name}`" in variables.OF_CLIENTS["KEEPSTEP_OTEL"] for name in (*SPAN_GROUPS, LOGS))
    fields = {one.name for one in dataclasses.fields(StepRecord)}
    assert set(scalars.FIELDS) <= fields
    listed = {name.removeprefix(scalars.PREFIX) for name in rows(TELEMETRY, "Scalars")}
    assert listed == {*scalars.FIELDS, "discarded_steps"}
    facts = TELEMETRY.partition("#### Attributes\n")[2].partition("\n#")[0]
    assert all(f"`{name}`" in facts for name in fields - {"t", "values", "reason"})


def test_all_time_that_is_not_good_has_a_type_of_badput() -> None:
    assert {*BADPUT, State.TRAINING} == set(LIVING)
    assert sorted(rows(METRICS, "Types of badput")) == sorted(state.value for state in BADPUT)
    seconds = {state: float(number) for number, state in enumerate(LIVING, 1)}
    assert sum(badput(seconds).values()) == sum(seconds.values()) - seconds[State.TRAINING]
    assert all(f"`{kind}`" in METRICS for kind in BADPUT.values())
