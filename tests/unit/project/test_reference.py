"""docs/reference.md and docs/python.md are what `make reference` makes of the code, and leave out nothing of it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import keepstep
from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_mesh.config import variables
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.service import all_routes
from keepstep_metrics.app import Metrics, MetricsSettings
from keepstep_relay.app import Relay
from keepstep_relay.settings import RelaySettings

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reference.md").read_text()
MADE = runpy.run_path(str(ROOT / "docs" / "reference.py"))
SERVICES = {
    "lighthouse": Lighthouse(LighthouseSettings()),
    "relay": Relay(RelaySettings()),
    "metrics service": Metrics(MetricsSettings()),
}
ROLES = {"none": Access.OPEN, "any": Access.READ} | {one.name.lower(): one for one in Access}


def section(title: str) -> str:
    return PAGE.partition(f"### {title}\n")[2].partition("\n#")[0]


def test_the_reference_is_as_the_code_is_now() -> None:
    assert MADE["reference"]() == PAGE, "the code has changed: run `make reference`"


MADE_WITH = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
assert MADE_WITH


@pytest.mark.skipif(
    not torch.__version__.startswith(f"{MADE_WITH[1]}."), reason=f"docs/python.md is made with torch {MADE_WITH[1]}"
)
def test_the_python_names_are_as_the_docstrings_are_now() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "docstrings.py"))
    page = (ROOT / "docs" / "python.md").read_text()
    assert made["python_names"]() == page, "a docstring has changed: run `make reference`"
    assert set(keepstep.__all__) - {"OptimizerWrapper"} <= set(re.findall(r"^### (\w+)$", page, re.MULTILINE))


def test_a_docstring_that_names_an_argument_that_is_not_there_is_found() -> None:
    def wait(seconds: float) -> None:
        """Wait.

        Args:
            second: time to wait.
        """

    made = runpy.run_path(str(ROOT / "docs" / "docstrings.py"))
    with pytest.raises(ValueError, match="wait has no argument second, but its docstring names it"):
        made["described"]("wait", wait)


@pytest.mark.parametrize("service", SERVICES)
def test_every_route_stands_there_with_the_roles_that_may_use_it(service: str) -> None:
    rows = re.findall(r"^\| `(\w+) (/\S*)` \| (\w+) \|", section(f"Routes of the {service}"), re.MULTILINE)
    written = {(method, path): ROLES[role] for method, path, role in rows}
    assert written == {(one.method, one.path): one.access for one in all_routes(SERVICES[service].service())}


@pytest.mark.parametrize("service", SERVICES)
def test_every_metric_stands_there_as_prometheus_sees_it(service: str) -> None:
    source = (ROOT / f"services/keepstep_{service.partition(' ')[0]}/api/prometheus.py").read_text()
    written = section(f"Metrics of the {service}")
    made = re.findall(r"(\w+)MetricFamily\(\s*\"(\w+)\"", source)
    assert made
    for kind, name in made:
        suffix = {"Counter": "_total", "Histogram": "_bucket"}.get(kind, "")
        assert re.search(rf"^\| `{name}{suffix}[`{{]", written, re.MULTILINE), name
    assert written.count("\n| `") == len(made)


def test_a_flag_of_a_service_stands_beside_the_variable_that_is_read_for_it() -> None:
    assert "| `--join-timeout TIME` | `KEEPSTEP_LIGHTHOUSE_JOIN_TIMEOUT` | 60 |" in section("keepstep lighthouse")
    assert "| `--lighthouse URL[,URL]` | `KEEPSTEP_LIGHTHOUSE` |" in section("keepstep relay")
    assert "| `--relay-bind HOST:PORT` | `KEEPSTEP_RELAY_BIND` |" in section("keepstep up")
    for service in ("lighthouse", "relay", "metrics"):
        without = re.findall(r"^\| `(--[\w-]+)[^|]*(?:\\\|[^|]*)*\| +\|", section(f"keepstep {service}"), re.MULTILINE)
        assert without == ["--log-format", "--log-level"]


def test_the_limits_of_a_trainer_stand_there_with_the_defaults_of_the_manager() -> None:
    assert re.search(r"`KEEPSTEP_QUORUM_TIMEOUT_SEC` \| .* \(60\) \|", PAGE)
    assert re.search(r"`KEEPSTEP_QUORUM_RETRIES` \| .* \(0\) \|", PAGE)


def test_no_variable_is_described_that_nobody_reads() -> None:
    files = [file for folder in ("libs", "services") for file in (ROOT / folder).rglob("*.py")]
    code = "\n".join(file.read_text() for file in files if file.name != "variables.py")
    looked_for = MADE["Asked"]()
    for settings in MADE["SETTINGS"].values():
        settings.read_settings({}, looked_for)
    described = {
        *variables.OF_CLIENTS,
        *variables.OF_TRAINERS,
        *variables.OF_LAUNCHERS,
        *variables.OF_SERVICES,
    }
    assert len(described) >= 25
    assert not [
        one
        for one in described - set(looked_for.names)
        if f'"{one}"' not in code and f'"{one.removeprefix("KEEPSTEP_")}"' not in code
    ]
