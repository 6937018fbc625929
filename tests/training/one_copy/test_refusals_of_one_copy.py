"""Members that differ from their job, in real processes: each is refused by name, and the job goes on.

Slow: each test trains in several processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep_mesh.exit_codes import EXIT_MISMATCH
from tests.support.jobs.one_copy_members import Members, members

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]

WITH_MANAGER = """
import torch
from torch import nn
from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
manager = Manager(ProcessGroupGloo(), state_dict=dict, load_state_dict=len)
model = nn.Linear(3, 1)
wrapped = DistributedDataParallel(manager, model), Optimizer(manager, torch.optim.SGD(model.parameters()))
manager.start_quorum()
"""


async def refused(job: Members, name: str, **variables: str) -> str:
    """Start a member that differs. Return the difference that it names when it ends."""
    job.start(name, count=2, **variables)
    return await refusal(job, name)


async def refusal(job: Members, name: str) -> str:
    """Return the difference that a member names when it ends. A job follows m0 or m1, whichever asked first."""
    assert await job.code(name) == EXIT_MISMATCH, job.output()
    (line,) = [one for one in job.text(name).splitlines() if "this group does not fit its job: " in one]
    return line.partition("this group does not fit its job: ")[2].replace(" in m1", " in m0")


async def test_a_member_that_differs_from_the_job_is_refused_by_name_and_the_job_goes_on(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=2)
        await job.trains("m0", "m1")
        for name, variables, difference in (
            ("threads", {"THREADS": "2"}, "setting OMP_NUM_THREADS: 2 in threads, 1 in m0"),
            ("copies", {"COPIES": "2"}, "setting copies: 2 in copies, 1 in m0"),
            ("mesh", {"MESH": '{"fsdp": -1, "tp": 1}'}, "setting mesh: fsdp=-1,tp=1 in mesh, fsdp=-1 in m0"),
            ("width", {"WIDTH": "24"}, "build() returns another model than before: parameter '0.weight' of shape (24,"),
            ("state", {"REGISTER": "ema"}, "states: none in m0, m1, ema in state"),
            ("sgd", {"OPTIMIZER": "SGD"}, "optimizer: AdamW in m0, m1, SGD in sgd"),
        ):
            assert (await refused(job, name, **variables)).startswith(difference), job.output()
        job.start("r0", count=2, arguments=("-c", WITH_MANAGER))
        assert (await refusal(job, "r0")).startswith("setting script: Manager in r0, OneCopy in m0"), job.output()
        await job.trains("m0", "m1")
        await job.finish("m0", "m1")


async def test_a_member_whose_loader_takes_other_samples_is_refused_and_no_step_is_committed_with_it(
    tmp_path: Path,
) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=4, SEED="1")
        job.start("odd", count=4, SEED="2")
        job.start("m2", count=4)  # as a stage of a pipeline that loads nothing
        difference = (await refusal(job, "odd")).partition(";")[0]
        assert difference.startswith("data loader: "), difference
        assert "seed=2, drop_last=False in odd" in difference
        assert "seed=1, drop_last=False in m0, m1" in difference
        assert job.steps("odd") == []
        await job.trains("m0", "m1", "m2")
        await job.finish("m0", "m1", "m2")


async def test_a_script_that_makes_a_loader_again_and_again_may_start_again(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=2, EACH_STEP="1")
        await job.trains("m0", "m1")
        job.kill("m1")
        job.start("m1", count=2, EACH_STEP="1")
        await job.trains("m0", "m1")
        await job.finish("m0", "m1")
        assert job.steps("m0")[-1]["step"] == job.steps("m1")[-1]["step"]


async def test_an_odd_optimizer_is_refused_at_the_start_and_in_the_step_in_which_it_changes(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", count=5)
        job.start("fast", count=5, LR="0.5")
        job.start("later", count=5, LR_FROM="6")
        for name in ("fast", "later"):
            difference = (await refusal(job, name)).partition(";")[0]
            assert difference.startswith("lr of parameter '0.weight': "), difference
            assert f"0.5 in {name}" in difference
            assert all(one in difference for one in ("m0", "m1", "m2", "0.01 in ")), difference
        assert {one["step"] for one in job.steps("later")} == set(range(1, 7)), job.output()
        await job.trains("m0", "m1", "m2")
        await job.finish("m0", "m1", "m2")


@pytest.mark.parametrize("ranks", [1, 2])
async def test_members_that_differ_from_the_start_are_all_refused_and_none_trains_alone(
    tmp_path: Path, ranks: int
) -> None:
    async with members(tmp_path) as job:
        job.start("m0", count=2, ranks=ranks)
        job.start("m1", count=2, ranks=ranks, OPTIMIZER="SGD")
        for name in ("m0", "m1"):
            difference = await refusal(job, name)
            assert difference.startswith("optimizer: "), difference
            assert "no side has a majority, so all are refused" in difference
            assert job.steps(name) == []


async def test_plain_tensors_may_be_stepped_with_other_options_from_some_step_on(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=3, PLAIN="1")
        job.start("m2", count=3, PLAIN="1", LR_FROM="3")  # as a stage of a pipeline
        await job.until(lambda: len(job.steps("m2")) > 6, "steps")
        await job.finish("m0", "m1", "m2")
        assert len({job.steps(name)[-1]["step"] for name in ("m0", "m1", "m2")}) == 1
