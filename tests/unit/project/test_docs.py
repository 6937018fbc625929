"""The documentation has all variables, routes, events, metrics, and exit codes of the code."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.processes.forked import FORKS

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *(
        ROOT / one
        for one in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/MEASURED.md")
    )
]
PAGES += sorted((ROOT / "docs").glob("*.md"))
DOCS = "\n".join(path.read_text() for path in PAGES)
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


def test_the_tls_errors_of_a_client_are_documented_word_for_word():
    text = (ROOT / "docs" / "security.md").read_text()
    table = text[text.index("| a client says |") :].partition("\n\n")[0].splitlines()[2:]
    said = [re.match(r"\| (.*?) \|", row)[1] for row in table]
    code = (ROOT / "libs/keepstep_mesh/security/request_errors.py").read_text()
    assert len(said) == 10
    assert not [one for one in said if one not in code]


@pytest.mark.parametrize("code", found(r"EXIT_[A-Z_]+ = (\d+)"))
def test_every_exit_code_of_a_trainer_is_documented(code):
    assert f"\n| {code} |" in DOCS


def prose(page: Path) -> str:
    """Without what stands in fences, where `#` begins a comment."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_every_link_leads_to_a_file_and_an_anchor_that_exist():
    checked, broken = 0, []
    for page in PAGES:
        links = re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)|\b(?:src|srcset)=\"([^\"]+)\"", prose(page))
        for link, anchor, image in links:
            if "://" in link:
                continue
            checked += 1
            to = (page.parent / (link or image)) if link or image else page
            if not to.exists() or (anchor and anchor not in anchors(to)):
                broken.append(f"{page.name}: {link or image}#{anchor}")
    assert checked >= 100
    assert not broken


def test_the_navigation_of_the_site_has_every_page_once():
    navigation = runpy.run_path(str(ROOT / "docs" / "conf.py"))["navigation"]((ROOT / "README.md").read_text())
    pages = re.findall(r"^[\w/-]+$", navigation, re.MULTILINE)
    assert sorted(pages) == sorted(str(page.relative_to(ROOT).with_suffix("")) for page in PAGES[1:])


def test_the_runbook_has_every_alert_with_its_meaning_and_what_to_do():
    rules = re.findall(r"- alert: (\w+)", (ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    entries = re.findall(
        r"^### (\w+)\n(.*?)(?=^##|\Z)", (ROOT / "docs" / "runbook.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert [name for name, _ in entries] == rules
    assert not [
        name
        for name, text in entries
        if re.findall(r"^\*\*(\w+):\*\*", text, re.MULTILINE) != ["Meaning", "Look", "Do"]
    ]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(set(found)) == len(found), f"{page.name}: two headings with one anchor"
    return set(found)


def test_every_file_that_is_named_and_every_target_of_make_exists():
    named = re.findall(r"`((?:libs|services|tests|benchmarks|examples|docs|deploy)/[^`*: ]*)", DOCS)
    assert len(named) >= 50
    assert not [one for one in named if not (ROOT / one).exists()]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = set(re.findall(r"(?:^|`)make ([a-z]+)", DOCS, re.MULTILINE))
    assert {"demo", "test"} <= said <= targets


def test_every_package_and_every_folder_of_tests_has_its_place_where_it_is_told_what_is_where():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    packages = [
        one.parent.relative_to(ROOT) for top in ("libs", "services") for one in (ROOT / top).glob("*/__init__.py")
    ]
    assert len(packages) >= 6
    assert not [one for one in packages if f"| `{one}` |" not in text]
    (of_tests,) = re.findall(r"^\| `tests` \| (.*) \|$", text, re.MULTILINE)
    folders = [one.name for one in (ROOT / "tests").iterdir() if one.is_dir() and one.name[0] not in "._"]
    assert len(folders) >= 8
    assert not [folder for folder in folders if f"`{folder}`" not in of_tests]


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {re.match(r"[\w-]+", one)[0] for one in wanted} - {"keepstep"}
    text = (ROOT / "docs" / "dependencies.md").read_text()
    explained = set(re.findall(r"[\w-]+", " ".join(re.findall(r"^\| (.*?) \|", text, re.MULTILINE))))
    assert len(names) >= 15
    assert names <= explained


def test_the_commands_beside_the_figures_of_the_readme_exist():
    (costs,) = re.findall(r"^## What it costs.*?(?=^## )", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    runs = re.findall(r"^    \"(\w+)\": \w+\.run,$", (ROOT / "benchmarks" / "run.py").read_text(), re.MULTILINE)
    assert set(re.findall(r"`BENCH=(\w+)`", costs)) <= set(runs)


def test_every_test_named_in_the_documentation_exists():
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", DOCS))
    written = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) >= 20
    assert named <= written


def test_every_row_of_the_fault_runs_is_in_the_guarantees():
    from tests.faults.rows import ROWS

    text = (ROOT / "docs" / "guarantees.md").read_text()
    assert not [row.what for row in ROWS.values() if f"| {row.what} " not in text]


def test_every_import_in_an_example_is_one_that_there_is():
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS, re.DOTALL | re.MULTILINE)
    imports = [one for block in blocks for one in ast.walk(ast.parse(block)) if isinstance(one, ast.ImportFrom)]
    ours = [(one.module, name.name) for one in imports if one.module.startswith("keepstep") for name in one.names]
    assert len(ours) >= 10
    assert not [(module, name) for module, name in ours if not exists(module, name)]


def exists(module: str, name: str) -> bool:
    """Whether a module has the name, or belongs to a framework that is not installed."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError as error:
        return module.startswith("keepstep.integrations.") and "pip install" in str(error)


def test_the_page_about_ray_begins_with_its_whole_script():
    page = (ROOT / "docs" / "ray.md").read_text()
    assert page.partition("```python\n")[2].startswith((ROOT / "examples" / "train_ray_groups.py").read_text() + "```")


def test_every_member_of_the_manager_in_an_example_is_one_that_it_has():
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS, re.DOTALL | re.MULTILINE)
    shown = {name for block in blocks for name in re.findall(r"\bmanager\.(\w+)", block)}
    shown |= set(re.findall(r"`[Mm]anager\.(\w+)\(", DOCS))
    assert {"start_quorum", "current_step", "shutdown"} <= shown
    assert not [name for name in shown if not hasattr(importlib.import_module("keepstep.manager").Manager, name)]


def test_the_test_that_the_documentation_shows_passes(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.DOTALL)
    (tmp_path / "test_my_training.py").write_text(script)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    forked = os.environ | {FORKS: "1"}
    done = subprocess.run(command, cwd=tmp_path, env=forked, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
