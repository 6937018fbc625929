"""Every sample in exactly one committed step, and the same steps with any number of groups that come and go."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, Dataset

from keepstep import ElasticLoader, ElasticSampler, Manager
from keepstep.elastic_data.permutation import Permutation
from tests.services.manager.groups import manager, place_to_meet, refusal, together

LENGTH, BATCH, EPOCHS = 103, 10, 3
STEPS = 11 * EPOCHS
"""Ten whole batches and one of three samples in each epoch."""
DEADLINE = 60


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index % 7], dtype=torch.float64)


class Group:
    """Fits ``weight`` to the mean of the samples, and notes the samples of its committed steps."""

    def __init__(self, lighthouse: str, name: str, trained: Counter[tuple[int, int]], **options: Any) -> None:
        self.lighthouse, self.name, self.trained, self.options = lighthouse, name, trained, options
        self.state = {"weight": torch.zeros(2, dtype=torch.float64)}
        self.losses: dict[int, float] = {}
        """Of all samples of each committed step, by its number."""
        self.over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        """Averages over the ranks of this group."""
        self.begin: threading.Barrier | None = None
        self.groups: set[int] = set()
        self.spoils_step = -1
        self.dies_in_step = -1
        self.reached: dict[int, threading.Event] = {}
        """Set before the step of this number."""
        self.waits_for: dict[int, threading.Event] = {}
        """Waited for before the step of this number."""

    def train(self, **loading: Any) -> torch.Tensor:
        with manager(self.lighthouse, self.name, self.state, **self.options) as m:
            sampler = ElasticSampler(LENGTH, m, BATCH, seed=4)
            loader = ElasticLoader(Numbers(), sampler, **loading)
            if self.begin is not None:
                self.begin.wait(DEADLINE)  # the first quorum waits for all that are connected
            while sampler.epoch < EPOCHS:
                for batch in loader:
                    if not self.step(m, sampler, batch):
                        return self.state["weight"]
            m.finish()  # else the others may still read from this group in their last step
        return self.state["weight"]

    def step(self, m: Manager, sampler: ElasticSampler, batch: torch.Tensor) -> bool:
        before, epoch = m.current_step(), sampler.epoch
        if before == self.dies_in_step:
            return False
        if before == self.spoils_step:
            self.spoils_step = -1
            m.report_error(ValueError("a spoilt step"))
        errors = self.state["weight"] - batch
        means = torch.cat([errors.mean(0), errors.square().mean().view(1)]) * sampler.weight
        m.allreduce(means).wait()
        means = self.over_ranks(means)
        counts = m.is_participating() and sampler.weight > 0
        if m.should_commit():
            self.state["weight"] -= 0.1 * means[:2]
            self.losses[m.current_step()] = means[2].item()
            self.groups.add(m.num_participants())
            if counts:
                self.trained.update((epoch, int(index)) for index in batch[:, 0])
        if (reached := self.reached.get(m.current_step())) is not None:
            reached.set()
        if (waits := self.waits_for.get(m.current_step())) is not None:
            assert waits.wait(DEADLINE)
        return True


def plain() -> tuple[torch.Tensor, dict[int, float]]:
    """Return the weight and the losses of one process without keepstep."""
    weight, data, losses = torch.zeros(2, dtype=torch.float64), Numbers(), dict[int, float]()
    for epoch in range(EPOCHS):
        order = Permutation(LENGTH, 4, epoch).at(0, LENGTH)
        for start in range(0, LENGTH, BATCH):
            samples = torch.stack([data[index] for index in order[start : start + BATCH]])
            losses[len(losses) + 1] = (weight - samples).square().mean().item()
            weight -= 0.1 * (weight - samples).mean(0)
    return weight, losses


def assert_plain(*groups: Group) -> None:
    """Require the weight, and in the steps that a group committed the losses, of one process without keepstep."""
    weight, losses = plain()
    for group in groups:
        assert torch.equal(group.state["weight"], groups[0].state["weight"])
        torch.testing.assert_close(group.state["weight"], weight, rtol=1e-12, atol=1e-12)
        assert group.losses == pytest.approx({step: losses[step] for step in group.losses}, rel=1e-12)


ONCE = Counter((epoch, index) for epoch in range(EPOCHS) for index in range(LENGTH))


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_groups_that_die_and_come_back_train_every_sample_once_and_reach_the_weights_of_one_process(lighthouse, sync):
    trained: Counter[tuple[int, int]] = Counter()
    a, b, dying, back = (Group(lighthouse, name, trained, use_async_quorum=not sync) for name in "abcc")
    together_now, left, is_back = threading.Barrier(3), threading.Event(), threading.Event()
    dying.dies_in_step, b.spoils_step, a.spoils_step = 7, 5, 16
    b.reached[12], a.waits_for[12], b.waits_for[12] = left, is_back, is_back
    back.options["quorum_timeout"] = timedelta(seconds=DEADLINE)

    def dies_and_comes_back() -> torch.Tensor:
        together_now.wait(DEADLINE)
        dying.train()
        assert left.wait(DEADLINE)
        threading.Timer(0.5, is_back.set).start()  # its request is there by then; if not, it heals one step later
        return back.train()

    def stays(group: Group) -> torch.Tensor:
        together_now.wait(DEADLINE)
        return group.train()

    together(lambda: stays(a), lambda: stays(b), dies_and_comes_back)
    assert trained == ONCE
    assert_plain(a, b, back)
    assert a.groups >= {2, 3}
    assert a.losses.keys() | b.losses.keys() | dying.losses.keys() == set(range(1, STEPS + 1))


class Ranks:
    """The ranks of one group, each in a thread."""

    def __init__(self, ranks: int) -> None:
        self._parts: list[torch.Tensor] = [torch.empty(0)] * ranks
        self._meet = threading.Barrier(ranks)

    def average(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = tensor
        self._meet.wait(DEADLINE)
        mean = torch.stack(self._parts).mean(0)
        self._meet.wait(DEADLINE)
        return mean


@pytest.mark.parametrize(("groups", "ranks"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_the_losses_are_those_of_one_process_with_any_number_of_groups_and_ranks(lighthouse, groups, ranks):
    trained: Counter[tuple[int, int]] = Counter()
    begin, members = threading.Barrier(groups * ranks), []
    for name in "abc"[:groups]:
        place, of_group = place_to_meet() if ranks > 1 else {}, Ranks(ranks)
        for rank in range(ranks):
            one = Group(lighthouse, name, trained, **place, **({"rank": rank} if ranks > 1 else {}))
            one.over_ranks = partial(of_group.average, rank)
            one.begin = begin
            members.append(one)
    together(*(one.train for one in members))
    assert trained == ONCE
    assert_plain(*members)
    assert {len(one.losses) for one in members} == {STEPS}


def test_worker_processes_load_ahead_and_a_spoilt_step_is_repeated_with_the_same_samples(lighthouse):
    trained: Counter[tuple[int, int]] = Counter()
    group = Group(lighthouse, "a", trained)
    group.spoils_step = 4
    group.train(num_workers=2, prefetch_factor=2)
    assert trained == ONCE
    assert_plain(group)


def test_the_position_goes_on_from_a_checkpoint_with_another_batch_size(lighthouse):
    with manager(lighthouse, "a") as m:
        sampler = ElasticSampler(LENGTH, m, BATCH)
        for _, _ in zip(range(3), sampler, strict=False):
            assert m.should_commit()
        saved = sampler.state_dict()
    assert (saved["epoch"], saved["sample"], saved["step"]) == (0, 30, 3)
    with manager(lighthouse, "b") as m:
        sampler = ElasticSampler(LENGTH, m, 50)
        sampler.load_state_dict(saved)
        drawn = []
        for indices in sampler:
            drawn += indices
            assert m.should_commit()
        assert drawn == Permutation(LENGTH, 0, 0).at(30, LENGTH)
        assert (sampler.epoch, sampler.sample) == (1, 0)


def elastic_loader(sampler: ElasticSampler) -> Any:
    return ElasticLoader(Numbers(), sampler)


def stateful_loader(sampler: ElasticSampler) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return torchdata.StatefulDataLoader(Numbers(), batch_sampler=sampler)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("build", [elastic_loader, stateful_loader])
def test_a_loader_goes_on_from_its_state_in_the_middle_of_an_epoch(lighthouse, build):
    with manager(lighthouse, "a") as m:
        loader = build(ElasticSampler(LENGTH, m, BATCH))
        assert isinstance(loader, Stateful)
        for _, _ in zip(range(3), loader, strict=False):
            assert m.should_commit()
        saved = loader.state_dict()
    with manager(lighthouse, "b") as m:
        loader = build(sampler := ElasticSampler(LENGTH, m, 50))
        loader.load_state_dict(saved)
        drawn: list[float] = []
        for batch in loader:
            drawn += batch[:, 0].tolist()
            assert m.should_commit()
        assert drawn == Permutation(LENGTH, 0, 0).at(30, LENGTH)
        assert (sampler.epoch, sampler.sample) == (1, 0)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("build", [elastic_loader, stateful_loader])
def test_a_loader_whose_state_is_of_the_end_of_an_epoch_goes_on_with_the_next_one(lighthouse, build):
    with manager(lighthouse, "a") as m:
        loader = build(ElasticSampler(LENGTH, m, BATCH))
        for _ in loader:
            assert m.should_commit()
        saved, job = loader.state_dict(), m.state_dict()
    with manager(lighthouse, "b") as m:
        loader = build(sampler := ElasticSampler(LENGTH, m, BATCH))
        m.load_state_dict(job)
        loader.load_state_dict(saved)
        drawn: list[float] = []
        for batch in loader:
            drawn += batch[:, 0].tolist()
            assert m.should_commit()
        assert drawn == Permutation(LENGTH, 0, 1).at(0, LENGTH)
        assert (sampler.epoch, sampler.sample) == (2, 0)


def test_two_draws_in_one_step_are_an_error(lighthouse):
    with manager(lighthouse, "a") as m:
        loader = DataLoader(Numbers(), batch_sampler=ElasticSampler(LENGTH, m, BATCH))
        batches = iter(loader)
        next(batches)
        with pytest.raises(RuntimeError, match="two batches were drawn in one step: end each step with should_commit"):
            next(batches)


def test_groups_with_other_arguments_are_refused_by_name(lighthouse):
    message = refusal(
        lighthouse,
        lambda m: ElasticSampler(LENGTH, m, 10),
        lambda m: ElasticSampler(LENGTH, m, 20, rank=0, num_ranks=2),
    )
    assert "global_batch_size=20, num_ranks=2" in message
    assert "global_batch_size=10, num_ranks=1" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "length=0 must be at least 1"),
        ((5, 6), r"global_batch_size=6 must be in \[1, length=5\]"),
    ],
)
def test_numbers_out_of_range_are_named(lighthouse, arguments, message):
    length, size = arguments
    with manager(lighthouse, "a") as m, pytest.raises(ValueError, match=message):
        ElasticSampler(length, m, size)


def test_a_state_of_another_seed_or_dataset_is_refused(lighthouse):
    with manager(lighthouse, "a") as m:
        sampler = ElasticSampler(LENGTH, m, BATCH, seed=1)
        saved = sampler.state_dict()
        with pytest.raises(ValueError, match="pass the same seed"):
            sampler.load_state_dict({**saved, "seed": 2})
        with pytest.raises(ValueError, match="at sample 500 of epoch 0, and this dataset has 103 samples"):
            sampler.load_state_dict({**saved, "sample": 500})
        with pytest.raises(TypeError, match="takes no batch_size, shuffle"):
            ElasticLoader(Numbers(), sampler, batch_size=3, shuffle=True)


def test_a_group_that_is_lost_between_the_draw_and_zero_grad_leaves_no_sample_out(lighthouse):
    ready, drawn, left = threading.Barrier(2), threading.Barrier(2), threading.Event()

    def leaves() -> None:
        with manager(lighthouse, "a") as m:
            sampler = ElasticSampler(LENGTH, m, BATCH)
            ready.wait(DEADLINE)  # else it may be alone in its quorum, and the other one waits for it
            sampler.draw()
            drawn.wait(DEADLINE)
        left.set()

    def stays() -> list[int]:
        with manager(lighthouse, "b") as m:
            sampler = ElasticSampler(LENGTH, m, BATCH)
            ready.wait(DEADLINE)
            sampler.draw()
            drawn.wait(DEADLINE)
            assert left.wait(DEADLINE)
            m.report_error(ValueError("the other group was lost"))
            m.start_quorum()  # as Optimizer.zero_grad does
            assert not m.should_commit()
            trained = sampler.indices(sampler.draw())
            m.start_quorum()
            assert m.should_commit()
            return trained

    _, trained = together(leaves, stays)
    assert trained == Permutation(LENGTH, 0, 0).at(0, BATCH)


class Breaks(Numbers):
    """Raises an error for the first sample of the third batch, once."""

    breaks = True

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.breaks and index == 2 * BATCH:
            self.breaks = False
            raise OSError("no such sample now")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_batch_after_an_error_of_the_dataset_is_the_one_of_the_step(lighthouse, workers):
    trained = []
    with manager(lighthouse, "a") as m:
        sampler = ElasticSampler(LENGTH, m, BATCH, shuffle=False)
        loader = ElasticLoader(Breaks(), sampler, num_workers=workers)
        while sampler.sample < 5 * BATCH:
            try:
                for batch in loader:
                    trained += batch[:, 0].int().tolist()
                    assert m.should_commit()
                    if sampler.sample == 5 * BATCH:
                        break
            except OSError as error:
                m.report_error(error)
                assert not m.should_commit()
                loader._loader.dataset.breaks = False  # each new worker gets a copy
    del loader
    gc.collect()  # the iterator that failed is in a cycle with its error, and its worker ends with it
    assert trained == list(range(5 * BATCH))


def test_a_position_that_is_read_before_the_manager_is_loaded_stays_the_position_of_the_checkpoint(lighthouse):
    with manager(lighthouse, "a") as m:
        sampler = ElasticSampler(LENGTH, m, BATCH)
        sampler.load_state_dict({"epoch": 0, "sample": 30, "step": 3, "seed": 0, "version": 1})
        assert sampler.sample == 30
        m.load_state_dict({"step": 3, "batches_committed": 3})
        assert sampler.sample == 30
