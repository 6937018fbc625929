"""docs/parity.md is true: each name of torchft that it lists as the same imports, with the same parameters."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MADE = runpy.run_path(str(ROOT / "docs" / "parity.py"))
NAMES = MADE["NAMES"]
PRESENT = [
    (module, name) for module, names in NAMES.items() for name in names if name not in MADE["ABSENT"].get(module, ())
]


def test_the_page_is_as_the_code_is_now() -> None:
    page = (ROOT / "docs" / "parity.md").read_text()
    assert MADE["parity"]() == page, "a name or a parameter has changed: run `make reference`"


@pytest.mark.parametrize(("module", "name"), PRESENT)
def test_a_name_of_torchft_imports_under_the_same_path(module, name) -> None:
    assert callable(getattr(importlib.import_module(f"keepstep.{module}"), name))


@pytest.mark.parametrize(
    ("package", "names"),
    [
        (
            "keepstep",
            (
                "DistributedDataParallel DistributedSampler Manager Optimizer ProcessGroupBabyNCCL "
                "ProcessGroupBabyXCCL ProcessGroupGloo ProcessGroupNCCL ProcessGroupXCCL"
            ),
        ),
        ("keepstep.checkpointing", "CheckpointTransport HTTPTransport"),
    ],
)
def test_a_package_exports_the_names_that_torchfts_does(package, names) -> None:
    assert set(names.split()) <= set(importlib.import_module(package).__all__)


def test_every_difference_has_a_reason_and_every_reason_a_difference() -> None:
    found = set()
    for module, name in PRESENT:
        methods = {one.partition("(")[0] for one in MADE["differences"](module, name, NAMES[module][name])}
        found |= {name if method == "__init__" else method for method in methods}
    assert found == set(MADE["DIFFERENT"])
