"""A Trainer and a loop of Accelerate count committed steps only, with the packages from PyPI."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from keepstep import Manager, ProcessGroupGloo
from keepstep.coordination import LighthouseServer

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    pytest.skip("transformers is not installed: pip install -e '.[transformers]'", allow_module_level=True)

import accelerate
import transformers

from keepstep.integrations.transformers import KeepstepMixin, KeepstepTrainer, prepare
from keepstep.integrations.transformers.group_trainer import newest_checkpoint
from keepstep.local_sgd import LocalSGD

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


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Settings of the Managers that Trainers make."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    variables = {"KEEPSTEP_LIGHTHOUSE": lighthouse.address(), "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield monkeypatch
    lighthouse.shutdown()


DATA = [{"x": torch.ones(1), "labels": torch.zeros(1)}] * 8


def make(folder: Path, *callbacks: Any, **options: Any) -> Any:
    args = arguments(folder, **options)
    return KeepstepTrainer(
        model=Line(), args=args, train_dataset=DATA, eval_dataset=DATA[:2], callbacks=list(callbacks)
    )


def test_a_trainer_resumes_from_the_last_complete_checkpoint_and_takes_no_step_after_the_end(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Evaluation needs no lighthouse. A Trainer trains once. A group died while it wrote the newest checkpoint."""
    with environment.context() as patch:
        patch.delenv("KEEPSTEP_LIGHTHOUSE")
        assert "eval_loss" in make(tmp_path).evaluate()
    first = make(tmp_path, num_train_epochs=1)
    first.train()
    with pytest.raises(RuntimeError, match="has trained already"):
        first.train()
    for name, content in {"checkpoint-8": "{", "checkpoint-x": "{}"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(content)
    environment.setenv("KEEPSTEP_JOB", "again")
    notes = Notes(set())
    notes.trainer = again = make(tmp_path, notes, num_train_epochs=1)
    again.train(resume_from_checkpoint=True)
    assert notes.steps == []
    assert again.manager.current_step() == again.state.global_step == 4
    with pytest.raises(ValueError, match="no complete checkpoint in"):
        make(tmp_path / "none").train(resume_from_checkpoint=True)


def test_a_group_whose_callback_fails_leaves_the_job(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Failing(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise OSError("planned")

    trainer = make(tmp_path, Failing())
    with pytest.raises(OSError, match="planned"):
        trainer.train()
    with pytest.raises(RuntimeError):
        trainer.manager.start_quorum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim": "galore_adamw_layerwise"}, "changes the weights in the backward pass"),
        ({"optim": "adalomo"}, "optim='adalomo' changes the weights in the backward pass"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True divides a batch over the processes"),
        ({"auto_find_batch_size": True}, "would choose another batch size in each group"),
    ],
)
def test_arguments_that_would_let_groups_differ_are_refused_by_name(
    environment: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **options)


def test_a_reference_model_of_trl_that_follows_the_model_is_in_the_state(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    environment.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # by a thread that would stay
    environment.setattr("tqdm.tqdm.monitor_interval", 0)  # likewise
    states: dict[str, Any] = {}

    class NotingManager(Manager):
        def register_state_dict_fn(self, key: str, load: Any, save: Any, **options: Any) -> None:
            states[key] = save
            super().register_state_dict_fn(key, load, save, **options)

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "sun": 1, "rain": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?", eos_token="?")
    config = transformers.GPT2Config(vocab_size=3, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    policy, reference = (transformers.GPT2LMHeadModel(config) for _ in range(2))
    before = reference.state_dict()["transformer.wte.weight"].clone()
    args = trl.DPOConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", disable_tqdm=True, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": "sun", "chosen": " rain", "rejected": " sun"}] * 8)
    trainer = type("GroupTrainer", (KeepstepMixin, trl.DPOTrainer), {})(
        policy,
        reference,
        args,
        train_dataset=data,
        processing_class=tokenizer,
        manager=NotingManager(pg=ProcessGroupGloo()),
    )
    trainer.train()
    followed = states["ref_model"]()["transformer.wte.weight"]
    assert not followed.equal(before)
    assert followed.equal(policy.transformer.wte.weight)


def test_an_optimizer_of_parameters_outside_of_the_model_is_refused(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class OwnLoss(KeepstepTrainer):
        def create_optimizer(self, *_: Any) -> Any:
            self.centers = nn.Parameter(torch.zeros(2, 3))
            self.optimizer = torch.optim.SGD([*self.model.parameters(), self.centers], 0.1)
            return self.optimizer

    trainer = OwnLoss(model=Line(), args=arguments(tmp_path), train_dataset=DATA, eval_dataset=DATA)
    with pytest.raises(ValueError, match=r"1 parameters that are not in the model, .* shape \(2, 3\)"):
        trainer.train()


def test_a_stream_that_is_not_divided_is_refused(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install -e '.[datasets]'")
    environment.setenv("NUM_REPLICA_GROUPS", "2")
    trainer = make(tmp_path, max_steps=2)
    trainer.train_dataset = datasets.Dataset.from_list(DATA).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"the stream is not divided.*split_dataset_by_node"):
        trainer.get_train_dataloader()
    divide = importlib.import_module("datasets.distributed").split_dataset_by_node
    trainer.train_dataset = divide(trainer.train_dataset, 0, 2)
    assert len(list(trainer.get_train_dataloader())) == 2


class Twice(torch.utils.data.Sampler[int]):
    """Yields each position two times, as samplers of reinforcement learning do."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return (position for position in range(self.length) for _ in range(2))

    def __len__(self) -> int:
        return 2 * self.length


class TwiceTrainer(transformers.Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Twice:
        return Twice(len(self.train_dataset if train_dataset is None else train_dataset))


class AllTrainer(transformers.Trainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=4)


def make_of(kind: type, folder: Path, samples: int) -> Any:
    data = [{"x": torch.full((1,), float(number)), "labels": torch.zeros(1)} for number in range(samples)]
    group = type("GroupTrainer", (KeepstepMixin, kind), {})
    return group(model=Line(), args=arguments(folder), train_dataset=data, eval_dataset=data[:2])


def test_the_sampler_of_a_class_of_trainers_draws_from_the_samples_of_the_group(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("NUM_REPLICA_GROUPS", "2")
    environment.setenv("REPLICA_GROUP_ID", "1")
    loader = make_of(TwiceTrainer, tmp_path, 7).get_train_dataloader()
    assert [batch["x"].flatten().tolist() for batch in loader] == [[1, 1], [3, 3], [5, 5]]


def test_a_loader_that_does_not_ask_for_the_samples_of_the_group_gets_a_warning(
    environment: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_of(AllTrainer, tmp_path, 8).get_train_dataloader()
    assert "samples are not divided" not in caplog.text
    environment.setenv("NUM_REPLICA_GROUPS", "2")
    make_of(AllTrainer, tmp_path, 8).get_train_dataloader()
    assert "get_train_dataloader of GroupTrainer did not call _get_train_sampler" in caplog.text
    caplog.clear()
    make(tmp_path).get_train_dataloader()
    assert "samples are not divided" not in caplog.text


def test_workers_of_each_group_have_random_numbers_of_their_own(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("NUM_REPLICA_GROUPS", "3")
    environment.setenv("REPLICA_GROUP_ID", "2")
    assert make(tmp_path).get_train_dataloader().worker_init_fn.keywords["rank"] == 2


def test_a_group_that_is_asked_to_leave_writes_the_checkpoint_of_enable_jit_checkpoint(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a real SIGTERM, whose handlers are those of the Manager and of the process."""
    before = signal.getsignal(signal.SIGTERM)

    class Preempted(transformers.TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make(tmp_path, Preempted(), num_train_epochs=4, enable_jit_checkpoint=True)
    trainer.args.save_strategy = transformers.trainer_utils.SaveStrategy.NO
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 0
    assert json.loads((tmp_path / "checkpoint-3" / "keepstep.json").read_text())["step"] == 3
    assert newest_checkpoint(str(tmp_path)) == 3, "complete"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("together", [True, False])
def test_a_loop_of_accelerate_steps_its_scheduler_only_with_the_optimizer(manager: Any, together: bool) -> None:
    """It accumulates a second model too, which no optimizer trains. The scheduler is prepared with all, or later."""
    accelerate.state.GradientState._reset_state()  # the Trainer of another test has left its data there
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain, teacher = Line(), Line()
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    if together:
        own = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
        model, accelerated, scheduler = accelerator.prepare(plain, sgd, own)
        model, optimizer = prepare(accelerator, manager, model, accelerated)
    else:
        model, optimizer = prepare(accelerator, manager, *accelerator.prepare(plain, sgd))
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    manager.register_state_dict_fn("model", plain.load_state_dict, plain.state_dict)
    skipped = []
    for number in range(8):
        with accelerator.accumulate(model, teacher):
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


def test_a_folder_of_accelerate_has_the_step_of_the_manager(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = []
    for job in ("first", "second"):
        environment.setenv("KEEPSTEP_JOB", job)
        accelerate.state.GradientState._reset_state()
        accelerator, plain = accelerate.Accelerator(cpu=True), Line()
        model, inner = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
        manager = Manager(pg=ProcessGroupGloo())
        model, optimizer = prepare(accelerator, manager, model, inner)
        manager.register_state_dict_fn("model", plain.load_state_dict, plain.state_dict)
        accelerator.register_for_checkpointing(manager)
        if job == "second":
            accelerator.load_state(tmp_path)
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 1))["loss"])
            optimizer.step()
            optimizer.zero_grad()
        steps.append(manager.current_step())
        accelerator.save_state(tmp_path)
        manager.shutdown()
    assert steps == [2, 4]


def test_the_optimizer_of_an_accelerator_is_refused_where_its_steps_cannot_be_counted(manager: Any) -> None:
    plain = Line()
    accelerated = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(plain.parameters(), 0.1))
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer without the hooks .* optimizer\.optimizer"):
        LocalSGD(manager, plain, accelerated, sync_every=2)
    LocalSGD(manager, plain, accelerated.optimizer, sync_every=2)


def test_an_overflow_and_a_step_that_does_not_commit_step_no_scheduler(manager: Any) -> None:
    """With the GradScaler that an Accelerator makes for float16 on a GPU."""
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=1024.0), True
    plain = Line()
    model, optimizer = prepare(
        accelerator, manager, *accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
    )
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    manager.register_state_dict_fn("model", plain.load_state_dict, plain.state_dict)
    steps = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        accelerator.backward(model(torch.ones(2, 1))["loss"] * factor)
        if len(steps) == 2:
            manager.report_error(RuntimeError("planned"))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        steps.append((optimizer.committed, accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()))
    assert steps == [(True, False, 1024.0), (True, True, 512.0), (False, True, 512.0), (True, False, 512.0)]
    assert manager.current_step() == 3
    assert scheduler.scheduler.last_epoch == 2
