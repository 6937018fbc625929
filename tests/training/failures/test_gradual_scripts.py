"""Groups that add a model, an optimizer, a sampler and a state while they train; one is killed and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep_mesh.exit_codes import EXIT_MISMATCH
from tests.support.jobs.job import Group, Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

SCRIPT = """
import hashlib, json, os, torch
from keepstep import DistributedDataParallel, ElasticSampler, Manager, Optimizer, ProcessGroupGloo

group, adds = os.environ["REPLICA_GROUP_ID"], os.environ["ADDS"]
models, inner = [], []
averages = {"weight": torch.zeros(())}
manager = Manager(pg=ProcessGroupGloo(), use_async_quorum=os.environ["ASYNC"] == "1")


def register(name, part):
    manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)


def add_model(name):
    torch.manual_seed(os.getpid() if not models else 1)  # the groups make the first model equal, and no later one
    model = torch.nn.Linear(4, 4)
    models.append(DistributedDataParallel(manager, model))
    inner.append(torch.optim.AdamW(model.parameters(), 0.01))
    register(f"model {name}", model)
    register(f"optimizer {name}", inner[-1])
    return Optimizer(manager, inner[-1])


optimizer = add_model("first")
while True:
    if len(models) == 1 and "model" in adds and manager.current_step() >= 3:
        add_model("second")
    if "sampler" in adds and manager.current_step() >= 4 and "sampler" not in globals():
        sampler = ElasticSampler(1000, manager, 8, seed=1)
    if "average" in adds and manager.current_step() >= 5 and "update" not in globals():
        manager.register_state_dict_fn("average", averages.update, lambda: dict(averages))
        update = True
    optimizer.zero_grad()
    assert manager.participating_rank() in (None, 0, 1) and not (manager.is_participating() and manager.is_healing())
    value = torch.ones(2, 4) * len(group)
    for model in models:
        value = model(value)
    value.square().sum().backward()
    with manager.committing() as committed:
        if committed:
            for one in inner:
                one.step()
            if "update" in globals():
                averages["weight"] = averages["weight"] * 0.9 + models[0].module.weight.detach().sum()
    for one in inner:
        one.zero_grad()
    assert manager.num_participants() > 0 or not committed
    if committed:
        state = [one.state_dict() for one in (*models, *inner)] + ([averages] if "update" in globals() else [])
        leaves = [one.tolist() for one in torch.utils._pytree.tree_leaves(state) if isinstance(one, torch.Tensor)]
        digest = hashlib.sha256(repr(leaves).encode()).hexdigest()
        line = {"event": "committed", "pid": os.getpid(), "step": manager.current_step(), "quorum_id": 1}
        print(json.dumps({**line, "digest": digest, "models": len(models)}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def variables(script: Path, adds: str, *, asynchronous: bool = True) -> dict[str, str]:
    return {"SCRIPTS": str(script), "ADDS": adds, "ASYNC": str(int(asynchronous))}


def trains_with(group: Group, models: int) -> bool:
    return any(one["models"] == models for one in group.lines if one["pid"] == group.ranks[0].pid)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("adds", ["model", "sampler", "average", "model sampler average"])
async def test_a_group_that_starts_after_the_others_have_added_parts_adds_them_and_heals(
    script: Path, adds: str, asynchronous: bool
) -> None:
    given = variables(script, adds, asynchronous=asynchronous)
    async with Job("--initial-replicas", "2") as job:
        a, b = [await job.start(name, **given) for name in ("a", "b")]
        await job.until(lambda: min(a.step(), b.step()) >= 8, "both train with all parts")
        b.kill()
        await b.gone()
        await job.start("b", **given)
        await job.advance(a, b)
        assert trains_with(b, 2 if "model" in adds else 1)
        assert job.assert_identical() > 10


async def test_a_group_whose_script_never_adds_what_the_job_has_is_refused_with_the_remedy(script: Path) -> None:
    async with Job("--initial-replicas", "2") as job:
        a, b = [await job.start(name, **variables(script, "model")) for name in ("a", "b")]
        await job.until(lambda: min(a.step(), b.step()) >= 4, "both train with two models")
        b.kill()
        await b.gone()
        b.output.clear()
        await job.start("b", **variables(script, ""))
        assert await b.exit_codes() == [EXIT_MISMATCH], job.report()
        said = "\n".join(b.output)
        assert said.count("the script takes this step alone") >= 3
        assert "entries that this group does not have yet (bucket_cap_mb default, weight (4, 4)" in said
        assert "make all models, optimizers and samplers before the first start_quorum(), or as soon as" in said
        await job.advance(a)
