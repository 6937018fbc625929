"""`keepstep job rm`: what an operator sees when a job is deleted."""

from __future__ import annotations

import json

import pytest

from keepstep_mesh.errors import JobClosed
from keepstep_mesh.security.tokens import Tokens
from tests.services.cli.scene import ADMIN, WORKER, keepstep, running
from tests.support.services.lighthouse_driver import eventually, round_of, worker


async def test_a_job_that_nobody_uses_is_deleted_and_one_in_use_only_by_force() -> None:
    async with running("r0") as job:
        async with worker(job.lighthouse.address, job="old") as group:
            await round_of([group])
        await eventually(lambda: not job.lighthouse.jobs["old"].sessions)
        await eventually(lambda: job.lighthouse.jobs["old"].core.returning() is None)
        listed = await keepstep("jobs", *job.at)
        assert [line.split()[:2] for line in listed.out.splitlines()[3:5]] == [
            ["default", "running"],
            ["old", "failed"],
        ]
        said = await keepstep("job", "rm", "old", *job.at)
        assert said.code == 0, said.err
        assert said.out.startswith("job old is deleted\n")
        assert "job_deleted" in said.out
        again = await keepstep("job", "rm", "old", *job.at)
        assert again.code == 4
        assert "job 'old' was deleted by admin" in again.err
        refused = await keepstep("job", "rm", "default", *job.at)
        assert refused.code == 4
        assert "1 connected groups (r0:1)" in refused.err
        assert "--force" in refused.err
        forced = await keepstep("job", "rm", "default", "--force", "--json", *job.at)
        assert forced.code == 0, forced.err
        assert json.loads(forced.out)["detail"]["evicted"] == ["r0:1"]
        assert not job.lighthouse.jobs


async def test_a_job_that_is_closed_is_reopened() -> None:
    async with running("r0") as job:
        refused = await keepstep("job", "reopen", "default", *job.at)
        assert refused.code == 4
        assert "job default is not closed: its groups have not finished together" in refused.err
        (group,) = job.groups
        with pytest.raises(JobClosed, match="closed at step 3"):
            await group.ask(3, lineage=1, final=True)
        said = await keepstep("job", "reopen", "default", *job.at)
        assert said.code == 0, said.err
        assert said.out.startswith("job default may train on from a checkpoint of step 3\n")


async def test_a_job_is_deleted_by_an_admin_only_and_named_once() -> None:
    async with running("r0", tokens=Tokens(worker=WORKER, admin=ADMIN)) as job:
        refused = await keepstep("job", "rm", "default", "--force", *job.at, KEEPSTEP_TOKEN=WORKER)
        assert refused.code == 4
        assert list(job.lighthouse.jobs) == ["default"]
        twice = await keepstep("job", "rm", "default", "--job", "other", *job.at)
        assert twice.code == 2
        assert "two jobs given: default and other (--job); give one" in twice.err
        nameless = await keepstep("job", "rm", *job.at)
        assert nameless.code == 2
