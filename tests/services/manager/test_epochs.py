"""Loops over epochs: what follows the batches of an epoch runs in step with the other groups, whatever heals."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from keepstep import ElasticLoader, ElasticSampler, Manager
from keepstep.integrations.grain import ElasticIterator
from tests.services.manager.durable.test_durable_checkpoints import run
from tests.services.manager.groups import manager, together, until_connected
from tests.support.services.relay_driver import relay_process

LENGTH, BATCH, EPOCHS = 23, 5, 4
PER_EPOCH = 5
STEPS = EPOCHS * PER_EPOCH
DEADLINE = 60


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def with_epochs(sampler: ElasticSampler) -> Iterator[None]:
    return sampler.epochs(EPOCHS)


def with_while(sampler: ElasticSampler) -> Iterator[None]:
    while sampler.epoch < EPOCHS:
        yield


class Group:
    """Adds the rate to its weight in each step, and halves the rate after each epoch."""

    def __init__(self, lighthouse: str, name: str, over: Any = with_epochs) -> None:
        self.lighthouse, self.name, self.over = lighthouse, name, over
        self.state = {"weight": torch.zeros(1, dtype=torch.float64), "rate": 1.0}
        self.ends: list[tuple[int, int]] = []
        """Number of complete epochs and of committed steps, each time the code after the inner loop ran."""
        self.before: dict[int, Any] = {}
        """Called once before the vote on the step that follows this one."""
        self.after: dict[int, Any] = {}
        """Called once after this step."""

    def train(self, checkpoint: dict[str, Any] | None = None, **options: Any) -> None:
        with manager(self.lighthouse, self.name, self.state, **options) as m:
            sampler = ElasticSampler(LENGTH, m, BATCH)
            if checkpoint is not None:
                m.load_state_dict(checkpoint["manager"])
                sampler.load_state_dict(checkpoint["sampler"])
            self.after.pop(0, lambda _: None)(m)
            for _ in self.over(sampler):
                for _ in ElasticLoader(Numbers(), sampler):
                    self.step(m)
                self.state["rate"] /= 2
                self.ends.append((sampler.epoch, m.current_step()))
            self.after.pop(-1, lambda _: None)(m)
            assert m.finish().step == STEPS
            assert sampler.epoch == EPOCHS

    def step(self, m: Manager) -> None:
        m.start_quorum()
        m.allreduce(torch.ones(1)).wait()
        self.before.pop(m.current_step(), lambda _: None)(m)
        if m.should_commit():
            self.state["weight"] += self.state["rate"]
        self.after.pop(m.current_step(), lambda _: None)(m)


ENDS = [(epoch + 1, PER_EPOCH * (epoch + 1)) for epoch in range(EPOCHS)]
WEIGHT = sum(PER_EPOCH / 2**epoch for epoch in range(EPOCHS))


def assert_trained(*groups: Group) -> None:
    for group in groups:
        assert group.state == {"weight": torch.tensor([WEIGHT], dtype=torch.float64), "rate": 0.5**EPOCHS}, group.name


@pytest.mark.parametrize("over", [with_epochs, with_while])
@pytest.mark.parametrize("own_checkpoint", [False, True], ids=["from nothing", "from a checkpoint"])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_a_group_that_heals_in_another_epoch_goes_on_in_it(lighthouse, over, own_checkpoint, sync):
    """It joins in the third epoch, and one that loaded a checkpoint of the first one heals in the middle of a loop."""
    a, b = Group(lighthouse, "a", over), Group(lighthouse, "b", over)
    join = threading.Event()
    checkpoint = {
        "manager": {"step": 1, "batches_committed": 1},
        "sampler": {"epoch": 0, "sample": BATCH, "step": 1, "seed": 0, "version": 1},
    }

    def waits_for_b(_: Manager) -> None:
        join.set()
        until_connected(lighthouse, "b", asked=True)

    a.after[12] = waits_for_b

    def joins() -> None:
        assert join.wait(DEADLINE)
        b.train(checkpoint if own_checkpoint else None, use_async_quorum=not sync)

    together(lambda: a.train(use_async_quorum=not sync), joins)
    assert_trained(a, b)
    assert a.ends == ENDS
    assert b.ends == ENDS[2:]


def test_a_group_that_heals_while_the_others_finish_runs_no_code_of_an_epoch_with_effect(lighthouse):
    """The last step commits in one group only, which finishes; the other one heals in the middle of its loop."""
    a, b = Group(lighthouse, "a"), Group(lighthouse, "b")
    begin, a_has_it = threading.Barrier(2), threading.Event()
    for group in (a, b):
        group.after[0] = lambda _: begin.wait(DEADLINE)
    a.after[STEPS] = lambda _: a_has_it.set()

    def fails_after_a(m: Manager) -> None:
        assert a_has_it.wait(DEADLINE)
        m.report_error(RuntimeError("planned"))

    b.before[STEPS - 1] = fails_after_a
    together(a.train, b.train)
    assert a.ends == ENDS
    assert_trained(a, b)


def test_a_group_that_starts_again_while_the_others_finish_ends_with_their_state(lighthouse):
    a, b = Group(lighthouse, "a"), Group(lighthouse, "b")
    ended, connected = threading.Event(), threading.Event()

    def waits_for_b(_: Manager) -> None:
        ended.set()
        assert connected.wait(DEADLINE)

    a.after[-1] = waits_for_b
    b.after[0] = lambda _: connected.set()

    def joins() -> None:
        assert ended.wait(DEADLINE)
        b.train()

    together(a.train, joins)
    assert_trained(a, b)
    assert len(b.ends) < 2, "at most the code after the loop runs, before finish() heals the group again"


def batches_of(m: Manager, kind: str) -> Iterator[Any]:
    """Yield all batches of a training."""
    if kind == "grain":
        grain = pytest.importorskip("grain", reason="grain is not installed: pip install -e '.[grain]'")
        yield from ElasticIterator(grain.MapDataset.source(range(LENGTH)).repeat(EPOCHS), m, BATCH)
        return
    sampler = ElasticSampler(LENGTH, m, BATCH)
    for _ in sampler.epochs(EPOCHS):
        yield from ElasticLoader(Numbers(), sampler)


@pytest.mark.parametrize("kind", ["epochs", "grain"])
async def test_a_job_that_resumes_from_its_last_step_trains_no_further_one(lighthouse, kind, tmp_path: Path):
    """As after an error in the code after the loop, which ends all groups."""

    def life(url: str, *, lost: bool) -> int:
        begun = 0
        with manager(lighthouse, None, durable_relays=url, durable_every=1) as m:
            for _ in batches_of(m, kind):
                begun += 1
                m.start_quorum()
                assert m.should_commit()
            if lost:
                m._durability.save()
                assert m._durability._writer.finish(DEADLINE)
            else:
                m.finish()
        return begun

    async with relay_process("--data-dir", str(tmp_path / "relay")) as (_, url):
        assert (await run(lambda: life(url, lost=True)))[0] >= STEPS - 1
        assert await run(lambda: life(url, lost=False)) == [0]


def stepping(m: Manager, sampler: ElasticSampler, *, elastic: bool) -> Any:
    return ElasticLoader(Numbers(), sampler) if elastic else DataLoader(Numbers(), batch_sampler=sampler)


@pytest.mark.parametrize("elastic", [True, False], ids=["ElasticLoader", "DataLoader"])
def test_a_batch_is_drawn_again_after_an_error_that_the_script_caught(lighthouse, elastic):
    trained: list[int] = []
    with manager(lighthouse, "a", {}) as m:
        sampler = ElasticSampler(LENGTH, m, BATCH, shuffle=False)
        loader = stepping(m, sampler, elastic=elastic)
        errors = {1, 3}
        for batch in loader:
            m.start_quorum()  # as Optimizer.zero_grad
            try:
                if m.current_step() in errors:
                    errors.remove(m.current_step())
                    raise MemoryError
            except MemoryError:
                continue
            m.allreduce(torch.ones(1)).wait()
            assert m.should_commit()
            trained += batch.tolist()
        assert m.current_step() == PER_EPOCH
    assert trained == list(range(LENGTH))


@pytest.mark.parametrize("elastic", [True, False], ids=["ElasticLoader", "DataLoader"])
def test_a_loop_that_an_exception_ended_is_run_again(lighthouse, elastic):
    """As a cell of a notebook after Ctrl-C, in the step and in the change of the weights."""
    trained: list[int] = []
    with manager(lighthouse, "a", {}) as m:
        sampler = ElasticSampler(LENGTH, m, BATCH, shuffle=False)
        loader = stepping(m, sampler, elastic=elastic)

        def cell(interrupted: int) -> None:
            for _ in sampler.epochs(1):
                for batch in loader:
                    if m.current_step() == interrupted:
                        raise KeyboardInterrupt
                    assert m.should_commit()
                    trained.extend(batch.tolist())

        for interrupted in (2, 3):
            with pytest.raises(KeyboardInterrupt):
                cell(interrupted)
        cell(-1)
    assert trained == list(range(LENGTH))


def test_a_group_whose_optimizer_was_interrupted_goes_on_where_the_others_are(lighthouse):
    a, b = Group(lighthouse, "a"), Group(lighthouse, "b")
    begin = threading.Barrier(2)
    for group in (a, b):
        group.after[0] = lambda _: begin.wait(DEADLINE)
    b.after[8] = lambda m: m.mark_torn()
    together(a.train, b.train)
    assert_trained(a, b)
    assert a.ends == b.ends == ENDS


def test_batches_of_an_accumulation_are_an_error(lighthouse):
    with manager(lighthouse, "a", {}) as m:
        loader = ElasticLoader(Numbers(), ElasticSampler(LENGTH, m, BATCH))
        with pytest.raises(RuntimeError, match="two batches were drawn in one step"):
            for number, _ in enumerate(loader):
                if number % 2:
                    m.should_commit()


class Noted(Numbers):
    epoch = calls = -1

    def __getitem__(self, index: int) -> tuple[int, int, int]:  # type: ignore[override]
        return self.epoch, self.calls, os.getpid()

    def set_epoch(self, epoch: int) -> None:
        self.calls = epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_see_what_the_script_sets_in_the_dataset_for_an_epoch(lighthouse, workers):
    seen = set()
    with manager(lighthouse, "a", {}) as m:
        sampler, dataset = ElasticSampler(LENGTH, m, BATCH), Noted()
        loader = ElasticLoader(dataset, sampler, num_workers=workers)
        for _ in sampler.epochs(3):
            epoch, dataset.epoch = sampler.epoch, 10 * sampler.epoch
            for epochs, calls, pids in loader:
                seen |= {(epoch, *one) for one in zip(epochs.tolist(), calls.tolist(), strict=True)}
                assert (os.getpid() in pids.tolist()) == (workers == 0)
                assert m.should_commit()
    assert seen == {(epoch, 10 * epoch, epoch) for epoch in range(3)}
