"""Real trainers that end with different weights: one group changes its weights by itself after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep_mesh.exit_codes import EXIT_DIVERGED
from tests.support.processes.forked import FORKS
from tests.support.services.command import Command

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

SCRIPT = """
import os, torch
from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
other = os.environ["REPLICA_GROUP_ID"] == os.environ["OTHER"]
sgd = torch.optim.SGD(model.parameters(), 0.1)
manager = Manager(pg=ProcessGroupGloo(), state_dict=model.state_dict, load_state_dict=model.load_state_dict)
ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
while manager.current_step() < int(os.environ["STEPS"]):
    optimizer.zero_grad()
    ddp(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.bias += 0.01 if other else 0.0
print("finished", manager.finish(), flush=True)
"""

Run = Callable[..., Command]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    commands: list[Command] = []

    def start(groups: int, other: int, steps: int) -> Command:
        (tmp_path / "script.py").write_text(SCRIPT)
        flags = ("--replicas", str(groups), "--min-replicas", "2")
        variables = {"STEPS": str(steps), "OTHER": str(other), FORKS: "1"}
        commands.append(Command(tmp_path, "run", *flags, "--", "script.py", deadline=200.0, **variables))
        return commands[-1]

    yield start
    for one in commands:
        one.close()


def test_two_groups_that_end_different_end_the_run_with_a_code_of_its_own(run: Run) -> None:
    command = run(groups=2, other=1, steps=6)
    assert command.wait() == EXIT_DIVERGED
    said = "\n".join(command.lines)
    assert "finished Finished" not in said
    assert "the weights of the groups differ after step 3 (r0 against r1)" in said
    assert "the groups have finished step 6 with different weights (r0 against r1)" in said


def test_a_group_that_differs_again_is_refused_by_name_and_the_others_finish(run: Run) -> None:
    command = run(groups=3, other=2, steps=20)
    assert command.wait() == EXIT_DIVERGED
    said = "\n".join(command.lines)
    assert said.count("finished Finished(step=20, groups=2)") == 2
    assert "the weights of r2 differ from those of r0, r1 after step 10 again: it had to heal" in said


def test_groups_that_end_equal_end_the_run_with_0(run: Run) -> None:
    command = run(groups=2, other=5, steps=3)
    assert command.wait() == 0, "\n".join(command.lines)
    assert "\n".join(command.lines).count("finished Finished(step=3, groups=2)") == 2
