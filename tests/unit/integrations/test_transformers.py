"""A Trainer and a loop of Accelerate count committed steps only, with the packages from PyPI."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import Manager, ProcessGroupGloo
from keepstep.coordination import LighthouseServer

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    pytest.skip("transformers is not installed: pip install -e '.[transformers]'", allow_module_level=True)

import accelerate
import transformers

from keepstep.integrations.transformers import KeepstepTrainer, prepare

pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers, about small runs


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch):
    """One group, with a lighthouse."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "1")
    made = Manager(pg=ProcessGroupGloo(), lighthouse_addr=lighthouse.address())
    yield made
    made.shutdown()
    lighthouse.shutdown()


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"loss": (y - (0 if labels is None else labels)).square().mean(), "logits": y}


class Notes(transformers.TrainerCallback):
    """Lets the steps after the given ones fail once, and notes what the Trainer does."""

    def __init__(self, failing: set[int]) -> None:
        self.failing = failing
        self.trainer: Any = None
        self.steps: list[tuple[int, bool]] = []
        self.logged: list[int] = []
        self.evaluated: list[int] = []

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step in self.failing:
            self.failing.remove(state.global_step)
            self.trainer.manager.report_error(RuntimeError("planned"))

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.steps.append((state.global_step, self.trainer.committed))
        assert state.epoch == state.global_step / 2

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.logged.append(state.global_step)

    def on_evaluate(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.evaluated.append(state.global_step)


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True,
        logging_steps=1, save_strategy="epoch", eval_strategy="epoch", **options,
    )  # fmt: skip


def test_a_trainer_skips_steps_that_do_not_commit_and_saves_the_managers_step(manager: Any, tmp_path: Path) -> None:
    data = [{"x": torch.ones(1), "labels": torch.zeros(1)}] * 8
    notes = Notes({1, 3})
    args = arguments(tmp_path, num_train_epochs=2, gradient_accumulation_steps=2)
    notes.trainer = trainer = KeepstepTrainer(
        manager=manager, model=Line(), args=args, train_dataset=data, eval_dataset=data[:2], callbacks=[notes]
    )
    trainer.train()
    assert notes.steps == [(1, True), (1, False), (2, True), (3, True), (3, False), (4, True)]
    assert trainer.state.global_step == manager.current_step() == 4, "two epochs of two committed steps"
    assert trainer.lr_scheduler.last_epoch == 4
    assert notes.logged == [1, 2, 3, 4]
    assert notes.evaluated == [2, 4]
    assert json.loads((tmp_path / "checkpoint-2" / "keepstep.json").read_text())["step"] == 2
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4"}


def test_a_loop_of_accelerate_steps_its_scheduler_only_with_the_optimizer(manager: Any) -> None:
    accelerate.state.GradientState._reset_state()  # the Trainer of another test has left its data there
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = Line()
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    model, optimizer = prepare(accelerator, manager, *accelerator.prepare(plain, sgd))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    manager.register_state_dict_fn("model", plain.load_state_dict, plain.state_dict)
    skipped = []
    for number in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 1))["loss"])
            if number == 3:
                manager.report_error(RuntimeError("planned"))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [False, True, False, False]
    assert manager.current_step() == scheduler.scheduler.last_epoch == 3
    assert not plain.layer.weight.grad
