"""Lightning's counters, schedulers, loggers and validation follow committed steps, with Lightning from PyPI."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

from keepstep.coordination import LighthouseServer

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: pip install -e '.[lightning]'")
logger = pytest.importorskip("lightning.pytorch.loggers.logger")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from keepstep.integrations.lightning import (  # noqa: E402
    KeepstepModelParallelStrategy,
    KeepstepStrategy,
    RelayCheckpointIO,
)
from keepstep.integrations.lightning.callback_state import load_states, states  # noqa: E402
from tests.support.services.relay_driver import relay  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about small runs


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One group, with a lighthouse."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    for name, value in {"LIGHTHOUSE": lighthouse.address(), "JOB": "j"}.items():
        monkeypatch.setenv(f"KEEPSTEP_{name}", value)
    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "1")
    yield
    lighthouse.shutdown()


class Notes(logger.Logger):
    """Notes the step of each logged training loss."""

    name, version = "notes", "0"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Log none."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics:
            self.steps.append(step)


class Line(pl.LightningModule):
    """A line, whose steps with a number in ``failing`` fail the first time."""

    def __init__(self, failing: set[int]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.failing = failing
        self.seen: list[tuple[int, int, bool]] = []
        self.validated: list[int] = []

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, _: Any) -> None:
        if self.global_step in self.failing:
            self.failing.remove(self.global_step)
            self.trainer.strategy.manager.report_error(RuntimeError("planned"))

    def on_train_batch_end(self, _out: Any, _batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, self.global_step, self.trainer.strategy.committed))

    def validation_step(self, batch: list[torch.Tensor], _number: int) -> None:
        self.log("val", self.layer(batch[0]).mean())

    def on_validation_end(self) -> None:
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> Any:
        adamw = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(adamw, 1, 0.5)
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


DATA = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=4)


def make(**options: Any) -> Any:
    return pl.Trainer(
        **{
            "strategy": "keepstep", "accelerator": "cpu", "devices": 1, "logger": False, "log_every_n_steps": 1,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "num_sanity_val_steps": 0, **options,
        }
    )  # fmt: skip


def fit(module: Line, **options: Any) -> tuple[Any, Notes]:
    notes = Notes()
    trainer = make(**{"logger": notes, "gradient_clip_val": 1.0, **options})
    trainer.fit(module, DATA, DATA)
    return trainer, notes


def test_a_step_that_does_not_commit_is_skipped_and_its_place_is_taken(alone: None) -> None:
    """The first step of an epoch fails, one in the middle, and the last one."""
    module = Line(failing={1, 3, 4})
    trainer, notes = fit(module, max_epochs=2)
    assert [(step, done) for _, step, done in module.seen] == [
        (1, True), (1, False), (2, True), (3, True), (3, False), (4, True),
        (4, False), (5, True), (6, True), (7, True), (8, True),
    ]  # fmt: skip
    assert [batch for batch, _, done in module.seen if done] == [0, 1, 2, 3] * 2, "an epoch has four committed steps"
    assert trainer.global_step == trainer.strategy.manager.current_step() == 8
    assert notes.steps == list(range(8)), "loggers see each committed step once"
    assert module.validated == [4, 8]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 8


def test_accumulated_batches_are_one_step(alone: None) -> None:
    module = Line(failing={1})
    trainer, _ = fit(module, max_steps=3, accumulate_grad_batches=2)
    assert trainer.strategy.manager.current_step() == trainer.global_step == 3
    assert [batch for batch, _, _ in module.seen] == [0, 1, 2, 3, 2, 3, 0, 1]


def test_a_place_loads_at_any_point_of_another_groups_step(alone: None) -> None:
    """A group in its first batch goes on where another one is: in its step, or at the end of its training."""
    places: list[Any] = []
    in_step = {"epoch": 2, "batch": 2, "in_step": 1, "total_batches": 10, "logged_steps": 10, "should_stop": False}
    ended = {**in_step, "batch": 4, "in_step": 0, "epoch": 3, "total_batches": 16}

    class Moved(Line):
        def on_before_optimizer_step(self, _: Any) -> None:
            loop = self.trainer.fit_loop.epoch_loop
            if not places:
                for place in (in_step, ended, in_step):
                    loop.load_position(place)
                    places.append((self.trainer.current_epoch, loop.batch_progress.current.ready, loop.total_batch_idx))

    module = Moved(set())
    trainer, _ = fit(module, max_epochs=4)
    assert places == [(2, 3, 10), (3, 4, 15), (2, 3, 10)]
    assert trainer.current_epoch == 4
    assert trainer.global_step == 6, "two steps of that epoch were left, and four of the last one"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": "2"}, "a group of 2 processes"),
        ({"REPLICA_GROUP_ID": "a"}, "do not say which samples this group trains on"),
    ],
)
def test_a_group_that_does_not_fit_is_refused(
    alone: None, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        fit(Line(set()), max_steps=1)


def test_a_hook_of_communication_is_refused_by_name(alone: None) -> None:
    with pytest.raises(ValueError, match="ddp_comm_hook has no effect"):
        fit(Line(set()), max_steps=1, strategy=KeepstepStrategy(ddp_comm_hook=fp16_compress_hook))


@pytest.mark.parametrize("writes", [True, False])
def test_only_the_group_that_writes_sets_the_link_to_its_last_checkpoint(
    alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writes: bool
) -> None:
    """Groups that set it at the same time would remove the link of each other."""
    monkeypatch.setattr(KeepstepStrategy, "_writes", lambda _: writes)
    saved = ModelCheckpoint(tmp_path, "{step}", save_last="link", enable_version_counter=False)
    fit(Line(set()), max_epochs=1, enable_checkpointing=True, callbacks=[saved])
    assert {one.name for one in tmp_path.iterdir()} == ({"step=4.ckpt", "last.ckpt"} if writes else set())


def test_synchronized_batchnorm_is_refused_by_name(alone: None) -> None:
    with pytest.raises(ValueError, match="sync_batchnorm=True has no effect"):
        fit(Line(set()), max_steps=1, sync_batchnorm=True)


def test_workers_of_each_group_have_random_numbers_of_their_own(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("REPLICA_GROUP_ID", "1")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    seen = {}

    class Seen(Line):
        def on_train_start(self) -> None:
            seen["train"] = self.trainer.train_dataloader.worker_init_fn.keywords["rank"]

        def on_validation_start(self) -> None:
            seen["val"] = self.trainer.val_dataloaders.worker_init_fn.keywords["rank"]

    fit(Seen(set()), max_epochs=1)
    assert seen == {"train": 1, "val": 0}, "groups validate alike"


async def test_checkpoints_are_stored_at_a_relay() -> None:
    async with relay() as at:
        place = RelayCheckpointIO(f"{at.address}/v1/jobs/j/checkpoints", kind="live")

        def check() -> None:
            saved = {"state_dict": {"w": torch.arange(1000.0)}, "global_step": 20}
            for step in (20, 21):  # the second one replaces the first
                place.save_checkpoint({**saved, "global_step": step}, "/models/epoch=1-step=20.ckpt")
            loaded = place.load_checkpoint("elsewhere/epoch=1-step=20.ckpt")
            assert loaded["global_step"] == 21
            assert loaded["state_dict"]["w"].equal(saved["state_dict"]["w"])
            with pytest.raises(ValueError, match="would run code"):
                place.load_checkpoint("epoch=1-step=20.ckpt", weights_only=False)
            place.remove_checkpoint("epoch=1-step=20.ckpt")
            place.remove_checkpoint("epoch=1-step=20.ckpt")
            with pytest.raises(FileNotFoundError, match="no checkpoint 'epoch-1-step-20'"):
                place.load_checkpoint("epoch=1-step=20.ckpt")
            place.teardown()

        await asyncio.to_thread(check)


async def test_a_trainer_saves_at_a_relay_evaluates_its_best_checkpoint_and_resumes_from_the_last(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with relay() as at:
        url = f"{at.address}/v1/jobs/j/checkpoints"

        def train(epochs: int, **options: Any) -> Any:
            place = RelayCheckpointIO(url, kind="live")
            saved = ModelCheckpoint("/x", "{step}", "val", save_top_k=2, save_last=True, enable_version_counter=False)
            trainer = make(max_epochs=epochs, enable_checkpointing=True, callbacks=[saved], plugins=[place])
            module = Line(set())
            trainer.fit(module, DATA, DATA, **options)
            ends = trainer.callback_metrics["val"]
            assert trainer.validate(module, DATA, ckpt_path="/x/last.ckpt", verbose=False)[0]["val"] == ends
            return trainer

        await asyncio.to_thread(train, 1)
        monkeypatch.setenv("KEEPSTEP_JOB", "k")
        assert (await asyncio.to_thread(train, 2, ckpt_path="/x/last.ckpt")).global_step == 8


def test_a_relay_is_refused_for_checkpoints_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's strategy does not use the plugin, so nothing would be stored at the relay."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    place = RelayCheckpointIO("http://127.0.0.1:1/v1/jobs/j/checkpoints")
    with pytest.raises(ValueError, match="RelayCheckpointIO does not store"):
        make(strategy=KeepstepModelParallelStrategy(), plugins=[place]).validate(Line(set()), DATA, verbose=False)


def test_a_model_checkpoint_heals_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Without its best models, a group would decide less often than the others, which would wait for it."""
    one, other = (ModelCheckpoint(tmp_path / name, monitor="val", save_top_k=2) for name in "ab")
    best = f"{one.dirpath}/step=8.ckpt"
    one.best_k_models, one.best_model_path, one.kth_best_model_path = {best: torch.tensor(0.5)}, best, best
    one.best_model_score = one.kth_value = torch.tensor(0.5)
    one._last_global_step_saved = 8
    load_states(SimpleNamespace(callbacks=[other]), states([one]))
    assert other.best_k_models == {f"{other.dirpath}/step=8.ckpt": torch.tensor(0.5)}
    assert other.best_model_path == other.kth_best_model_path == f"{other.dirpath}/step=8.ckpt"
    assert other._last_global_step_saved == 8


def test_hooks_see_gradients_without_the_scale_of_a_grad_scaler(alone: None) -> None:
    norms = []

    class Seen(Line):
        def on_before_optimizer_step(self, _: Any) -> None:
            norms.append(float(self.layer.weight.grad.norm()))
            super().on_before_optimizer_step(_)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    fit(Seen({1}), max_steps=3, gradient_clip_val=None, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert len(norms) == 4
    assert max(norms) < 10
    assert scaler.get_scale() == 2.0**10


def test_a_batch_whose_second_step_does_not_commit_is_not_repeated(alone: None) -> None:
    class TwoSteps(Line):
        automatic_optimization = False

        def training_step(self, batch: list[torch.Tensor], _number: int) -> None:
            for _ in range(2):
                self.optimizers().zero_grad()
                self.manual_backward(self.layer(batch[0]).square().mean())
                self.optimizers().step()

    module = TwoSteps({7})
    trainer, _ = fit(module, max_epochs=1, gradient_clip_val=None)
    assert [batch for batch, _, _ in module.seen] == [0, 1, 2, 3]
    assert trainer.global_step == trainer.strategy.manager.current_step() == 7
    assert module.validated == [7], "the epoch has ended"


def test_a_trainer_evaluates_without_a_lighthouse_and_fits_once(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Line(set())
    with monkeypatch.context() as patch:
        patch.delenv("KEEPSTEP_LIGHTHOUSE")
        assert "val" in make().validate(module, DATA, verbose=False)[0]
    trainer, _ = fit(module, max_epochs=1)
    assert "val" in trainer.validate(module, DATA, verbose=False)[0]
    with pytest.raises(RuntimeError, match="fit has run in this process"):
        trainer.fit(module, DATA)


def test_without_a_fit_the_strategy_has_no_manager() -> None:
    with pytest.raises(RuntimeError, match=r"Trainer\.fit makes it"):
        _ = KeepstepStrategy().manager
