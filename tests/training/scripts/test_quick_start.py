"""The scripts of README.md and docs/quick-start.md, started with `keepstep run`; one group is killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.processes.forked import FORKS
from tests.support.services.command import Command

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]

BEFORE = """
import torch
model = torch.nn.Linear(4, 1)
adamw = torch.optim.AdamW(model.parameters())
loss_fn = torch.nn.functional.mse_loss
batches, steps = iter(lambda: (torch.randn(8, 4), torch.randn(8, 1)), None), 50
"""
AFTER = """
print("after", manager.current_step(), "weights", model.weight.tolist())
"""


def test_the_lines_of_the_readme_train_and_all_groups_end_equal(tmp_path: Path, repository: Path) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(BEFORE + lines + AFTER)
    run = Command(tmp_path, "run", "--replicas", "2", "--", "train.py", deadline=150.0, **{FORKS: "1"})
    try:
        assert run.wait() == 0, "\n".join(run.lines)
    finally:
        run.close()
    ends = [match[1] for line in run.lines if (match := re.search(r"(after 50 weights .*)", line))]
    assert len(ends) == 2
    assert ends[0] == ends[1]


def test_the_script_of_the_quick_start_goes_on_when_a_group_is_killed(tmp_path: Path, repository: Path) -> None:
    page = (repository / "docs" / "quick-start.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "keepstep run --replicas 3 -- train.py" in page
    (tmp_path / "train.py").write_text(script)
    run = Command(tmp_path, "run", "--replicas", "3", "--", "train.py", deadline=150.0, **{FORKS: "1"})
    try:
        victim = int(run.wait_for(r"\[r1/0\] process (\d+)")[1])
        before = int(run.wait_for(r"\[r0/0\] step (\d+) groups 3 ")[1])
        os.kill(victim, signal.SIGKILL)
        run.wait_for(r"\[r1/0\] process \d+")
        assert int(run.wait_for(r"\[r1/0\] step (\d+) groups 3 ")[1]) > before
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        assert sum("[r0/0] process" in line for line in run.lines) == 1, "the others go on"
    finally:
        run.close()
