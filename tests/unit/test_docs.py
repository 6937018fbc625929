"""What the code offers stands in the documentation: variables, routes, events, metrics, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
SOURCE = {path: path.read_text() for folder in ("libs", "services") for path in sorted((ROOT / folder).rglob("*.py"))}


def found(pattern: str, folder: str = "") -> list[str]:
    return sorted({m for path, text in SOURCE.items() if folder in str(path) for m in re.findall(pattern, text)})


VARIABLES = sorted(
    {
        *found(r"\"(KEEPSTEP_[A-Z_]+[A-Z])\""),
        *(f"KEEPSTEP_{name}" for name in found(r"(?:variable|seconds|integer|rate)\(\"([A-Z_]+)\"", "libs/keepstep/")),
    }
)


def test_there_are_variables_to_look_for():
    assert {"KEEPSTEP_TIMEOUT_SEC", "KEEPSTEP_STEP_LOG", "KEEPSTEP_JOB"} <= set(VARIABLES)


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_is_documented(name):
    assert name in DOCS


EVENTS = found(r"(?:\.log\(|\bpart\(state, group,)\s*\"([a-z_]+)\"", "keepstep_lighthouse/")


def test_there_are_events_to_look_for():
    assert {"quorum", "lost", "left", "evicted", "policy"} <= set(EVENTS)


@pytest.mark.parametrize("kind", EVENTS)
def test_every_event_is_documented(kind):
    assert f"`{kind}`" in DOCS


@pytest.mark.parametrize("name", found(r"MetricFamily\(\s*\"([a-z_]+)\""))
def test_every_metric_is_documented(name):
    assert f"`{name}" in DOCS


def test_every_route_is_documented():
    from keepstep_lighthouse.app import Lighthouse
    from keepstep_lighthouse.settings import LighthouseSettings

    for route in Lighthouse(LighthouseSettings()).service().routes:
        path = route.path.replace("{replica}", "{replica_id}")
        assert f"`{route.method} {path}`" in DOCS


@pytest.mark.parametrize("page", ["lighthouse.md", "relay.md", "metrics.md"])
def test_every_route_is_documented_with_the_roles_that_may_use_it(page):
    from keepstep_lighthouse.app import Lighthouse
    from keepstep_lighthouse.settings import LighthouseSettings
    from keepstep_mesh.auth import Access
    from keepstep_mesh.service import all_routes
    from keepstep_metrics.app import Metrics, MetricsSettings
    from keepstep_relay.app import Relay
    from keepstep_relay.settings import RelaySettings

    services = {
        "lighthouse.md": Lighthouse(LighthouseSettings()),
        "relay.md": Relay(RelaySettings()),
        "metrics.md": Metrics(MetricsSettings()),
    }
    text = (ROOT / "docs" / page).read_text()
    rows = re.findall(r"^\| `(\w+) (/\S*)` \| (.*?) \|", text, re.MULTILINE)
    written = {(method, path): role for method, path, role in rows}
    names = {Access.OPEN: "none", Access.READ: "any", Access.WORKER: "worker", Access.SERVICE: "service"}
    names[Access.ADMIN] = "admin"
    routes = all_routes(services[page].service())
    assert {(one.method, one.path): names[one.access] for one in routes} == written


def test_what_a_client_says_of_tls_is_documented_as_it_says_it():
    text = (ROOT / "docs" / "security.md").read_text()
    table = text[text.index("| a client says |") :].partition("\n\n")[0].splitlines()[2:]
    said = [re.match(r"\| (.*?) \|", row)[1] for row in table]
    code = (ROOT / "libs/keepstep_mesh/tls.py").read_text()
    assert len(said) == 10
    assert not [one for one in said if one not in code]


@pytest.mark.parametrize("code", found(r"EXIT_[A-Z_]+ = (\d+)"))
def test_every_exit_code_of_a_trainer_is_documented(code):
    assert f"\n| {code} |" in DOCS


def test_every_link_of_the_documentation_leads_somewhere():
    for page in (
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks/README.md",
    ):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_anchor_of_the_documentation_exists():
    found = 0
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for link, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
            if "://" not in link:
                found += 1
                assert anchor in anchors(page.parent / link if link else page), f"{page.name}: {link}#{anchor}"
    assert found >= 5


def test_every_test_named_in_the_documentation_exists():
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", DOCS))
    written = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) >= 20
    assert named <= written


@pytest.mark.parametrize("page", ["guarantees.md", "testing.md"])
def test_every_file_and_command_that_is_named_as_proof_exists(page):
    from keepstep_cli.main import main

    text = (ROOT / "docs" / page).read_text()
    files = set(re.findall(r"`((?:tests|benchmarks|examples)/[^`: ]*)", text))
    assert files
    assert not [one for one in files if not (ROOT / one).exists()]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", "\n".join(re.findall(r"`[^`]+`", text)))) <= targets
    assert set(re.findall(r"`keepstep ([a-z-]+)", text)) <= set(main.commands)


def test_every_row_of_the_fault_runs_is_in_the_guarantees():
    from tests.faults.rows import ROWS

    text = (ROOT / "docs" / "guarantees.md").read_text()
    assert not [row.what for row in ROWS.values() if f"| {row.what} " not in text]


def test_the_test_that_the_documentation_shows_passes(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.DOTALL)
    (tmp_path / "test_my_training.py").write_text(script)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
