"""docs/quick-start.md, as a newcomer follows it: its script, run by `keepstep run`, and a group of it killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from command import Command

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]


def test_the_script_of_the_quick_start_goes_on_when_a_group_is_killed(tmp_path: Path, repository: Path) -> None:
    page = (repository / "docs" / "quick-start.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "keepstep run --replicas 3 -- train.py" in page
    (tmp_path / "train.py").write_text(script)
    run = Command(tmp_path, "run", "--replicas", "3", "--", "train.py", deadline=150.0)
    try:
        victim = int(run.wait_for(r"\[r1/0\] process (\d+)")[1])
        run.wait_for(r"\[r0/0\] step \d+ groups 3 ")
        os.kill(victim, signal.SIGKILL)
        run.wait_for(r"\[r0/0\] step \d+ groups 2 ")
        run.wait_for(r"\[r1/0\] step \d+ groups 3 ")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    finally:
        run.close()
