"""``on_step``: the figures of committed steps, in files of the real TensorBoard and W&B."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.services.manager.groups import manager


def train(lighthouse: str, on_step: Any) -> None:
    with manager(lighthouse, "a", on_step=on_step) as m:
        for loss in (0.5, 0.25):
            m.start_quorum()
            m.allreduce(torch.ones(3)).wait()
            m.record(loss=loss)
            assert m.should_commit()
        m.start_quorum()
        m.report_error(ValueError("the test lets this step fail"))
        assert not m.should_commit()
        m.start_quorum()
        assert m.should_commit()


def test_each_committed_step_gives_its_scalars_and_an_error_changes_nothing(
    lighthouse: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[dict[str, float], int]] = []

    def on_step(scalars: dict[str, float], step: int) -> None:
        seen.append((scalars, step))
        raise OSError("no space left")

    with caplog.at_level(logging.ERROR, "keepstep.telemetry"):
        train(lighthouse, on_step)
    assert [step for _, step in seen] == [1, 2, 3]
    assert [scalars.get("loss") for scalars, _ in seen] == [0.5, 0.25, None]
    assert [scalars["keepstep/discarded_steps"] for scalars, _ in seen] == [0.0, 0.0, 1.0]
    assert seen[0][0]["keepstep/seconds"] > 0
    assert seen[0][0]["keepstep/participants"] == 1.0
    assert sum("on_step failed" in one.message for one in caplog.records) == 1


def test_tensorboard_reads_what_a_step_gave(lighthouse: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:

        def on_step(scalars: dict[str, float], step: int) -> None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        train(lighthouse, on_step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [one.step for one in events.Scalars("keepstep/seconds")] == [1, 2, 3]


OFFLINE = """
import json, sys, wandb
from tests.services.manager.steps.test_scalars import train
with wandb.init(mode="offline", dir=sys.argv[2], project="test") as run:
    train(sys.argv[1], lambda scalars, step: run.log(scalars, step=step, commit=True))
    print(json.dumps({name: run.summary[name] for name in ("loss", "_step", "keepstep/discarded_steps")}))
"""


def test_wandb_knows_what_a_step_gave(lighthouse: str, tmp_path: Path) -> None:
    """In offline mode, in a process of its own: W&B starts another one, which ends with it."""
    pytest.importorskip("wandb", reason="needs wandb")
    command = [sys.executable, "-c", OFFLINE, lighthouse, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == {"loss": 0.25, "_step": 3, "keepstep/discarded_steps": 1.0}
