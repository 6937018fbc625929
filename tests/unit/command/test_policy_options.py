"""The flags of a job's policy follow the lighthouse's ``Policy``."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import keepstep_metrics
from keepstep_cli.asking.policy_options import FIELDS, Field
from keepstep_lighthouse.quorum.job_record import Policy


def test_each_field_of_the_policy_has_a_flag() -> None:
    assert {field.name for field in FIELDS} == {field.name for field in fields(Policy)}


@pytest.mark.parametrize("field", [one for one in FIELDS if one.name != "takeover_grace"], ids=lambda one: one.name)
def test_the_help_shows_the_default_of_the_policy(field: Field) -> None:
    assert field.type.convert(field.default, None, None) == getattr(Policy(), field.name)


def test_the_dashboard_names_each_field() -> None:
    script = Path(next(iter(keepstep_metrics.__path__)), "dashboard/policy.js").read_text()
    texts = script[script.index("TEXTS = {") : script.index("};", script.index("TEXTS"))]
    assert set(re.findall(r"^  (\w+):", texts, re.MULTILINE)) == {field.name for field in fields(Policy)}
