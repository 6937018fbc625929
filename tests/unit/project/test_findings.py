"""Each script in findings/ has the form that CONTRIBUTING.md states. `make findings` runs them; CI does not."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted((ROOT / "findings").glob("*.sh"))
PARTS = ("Guess", "Seen", "Version", "Why it matters", "keepstep")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_finding_has_its_parts_in_order_pins_its_packages_and_compares_its_output(script: Path) -> None:
    comment, _, program = script.read_text().partition('\nsource "$(dirname "$0")/environment"\n')
    parts = tuple(re.findall(r"^# ([A-Z][a-z ]+|keepstep):", comment, re.MULTILINE))
    assert parts in (PARTS, PARTS[:-1])
    (packages,) = re.findall(r"^packages (.+)$", program, re.MULTILINE)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", package) for package in packages.split())
    assert "show_versions(" in program
    assert "compare(" in program
    assert "import keepstep" not in program


def test_every_test_that_a_finding_names_exists() -> None:
    for script in SCRIPTS:
        for path, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", script.read_text()):
            assert f"def {name}" in (ROOT / path).read_text(), f"{script.name}: {path}::{name}"
