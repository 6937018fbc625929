"""A group begins its job: not again once the job is finished, and not unnoticed at an earlier step."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from keepstep import Manager
from keepstep.runtime.exits import StartRefusedExit
from tests.services.manager.groups import manager


def job(lighthouse: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default", timeout=60) as answer:
        return dict(json.load(answer))


def step(one: Manager) -> None:
    one.start_quorum()
    assert one.should_commit()


def test_a_finished_job_is_not_trained_again(lighthouse: str) -> None:
    with manager(lighthouse, "r0") as one:
        for _ in range(12):
            step(one)
    state = job(lighthouse)["state"]
    assert (state["code"], state["step"], state["why"]) == ("finished", 12, "")
    with (
        manager(lighthouse, "r0") as late,
        pytest.raises(StartRefusedExit, match="the job finished at step 12") as error,
    ):
        late.start_quorum()
        late.wait_quorum()
    assert error.value.code == 79
    assert job(lighthouse)["state"] == state


def test_a_script_that_ends_with_an_error_has_not_finished_and_a_new_start_is_logged(
    lighthouse: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), manager(lighthouse, "r0") as one:
        step(one)
        raise ZeroDivisionError("no batch")
    state = job(lighthouse)["state"]
    assert (state["code"], state["step"]) == ("failed", 1)
    assert "the script ended with ZeroDivisionError: no batch" in state["why"]
    with manager(lighthouse, "r0") as again:
        step(again)
    assert "the job went back" in caplog.text
