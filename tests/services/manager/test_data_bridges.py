"""Grain and Hugging Face datasets: every sample in exactly one committed step while groups die and come back."""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from keepstep import ElasticLoader, ElasticSampler, Manager
from keepstep.integrations.datasets import StreamLoader
from keepstep.integrations.grain import ElasticIterator
from tests.services.manager.groups import manager, together

LENGTH, BATCH, EPOCHS = 23, 5, 2
DEADLINE = 60


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install -e '.[datasets]'")
    importlib.import_module("tqdm").tqdm.monitor_interval = 0  # else a bar starts a thread that stays
    return datasets


def grain_elements(m: Manager) -> tuple[Any, ElasticSampler]:
    grain = pytest.importorskip("grain", reason="grain is not installed: pip install -e '.[grain]'")
    ds = grain.MapDataset.source(np.arange(LENGTH)).shuffle(seed=3).repeat(EPOCHS)
    loader = ElasticIterator(ds, m, BATCH)
    return loader, loader.sampler


def rows(m: Manager) -> tuple[Any, ElasticSampler]:
    datasets = hugging_face()
    ds = datasets.Dataset.from_dict({"index": list(range(LENGTH))}).with_format("torch")
    sampler = ElasticSampler(LENGTH, m, BATCH, seed=3)
    return ElasticLoader(ds, sampler), sampler


def stream_of(*, shuffled: bool) -> Any:
    datasets = hugging_face()
    ds = datasets.Dataset.from_dict({"index": list(range(LENGTH))}).to_iterable_dataset(num_shards=3)
    return ds.shuffle(seed=3, buffer_size=7) if shuffled else ds


def examples(m: Manager) -> tuple[Any, ElasticSampler]:
    loader = StreamLoader(stream_of(shuffled=True), LENGTH, m, BATCH)
    return loader, loader.sampler


class Group:
    """Takes batches to the end, and notes the samples of its committed steps."""

    def __init__(self, lighthouse: str, name: str, build: Callable[[Manager], tuple[Any, ElasticSampler]]) -> None:
        self.lighthouse, self.name, self.build = lighthouse, name, build
        self.taken: list[tuple[int, int]] = []
        self.dies_in_step = self.spoils_step = -1
        self.pauses: dict[int, Callable[[], object]] = {}
        """Called once before the step of this number."""

    def train(self) -> None:
        with manager(self.lighthouse, self.name, {}) as m:
            loader, sampler = self.build(m)
            self.pauses.pop(0, lambda: None)()
            while sampler.epoch * sampler.length + sampler.sample < EPOCHS * LENGTH:
                for batch in loader:
                    before, epoch = m.current_step(), sampler.epoch
                    if before == self.dies_in_step:
                        return
                    if before == self.spoils_step:
                        self.spoils_step = -1
                        m.report_error(ValueError("a spoilt step"))
                    counts = m.is_participating() and sampler.weight > 0
                    indices = (batch["index"] if isinstance(batch, dict) else batch).tolist()
                    m.allreduce(torch.ones(1)).wait()
                    if m.should_commit() and counts:
                        self.taken += [(epoch, index) for index in indices]
                    self.pauses.pop(m.current_step(), lambda: None)()
            m.finish()


@pytest.mark.parametrize("build", [grain_elements, rows, examples])
def test_every_sample_is_in_one_step_while_groups_die_and_come_back(lighthouse, build):
    a, b, dying, back = (Group(lighthouse, name, build) for name in "abcc")
    begin, left, is_back = threading.Barrier(3), threading.Event(), threading.Event()
    dying.dies_in_step, b.spoils_step = 2, 4
    for group in (a, b, dying):
        group.pauses[0] = lambda: begin.wait(DEADLINE)
    a.pauses[6] = lambda: is_back.wait(DEADLINE)
    b.pauses[6] = lambda: left.set() or is_back.wait(DEADLINE)
    back.pauses[0] = is_back.set

    def dies_and_comes_back() -> None:
        dying.train()
        assert left.wait(DEADLINE)
        back.train()

    together(a.train, b.train, dies_and_comes_back)
    taken = Counter(a.taken + b.taken + dying.taken + back.taken)
    if build is grain_elements:  # one epoch of the sampler is all that Grain repeats
        assert taken == Counter({(0, index): EPOCHS for index in range(LENGTH)})
    else:
        assert taken == Counter((epoch, index) for epoch in range(EPOCHS) for index in range(LENGTH))


def test_positions_go_to_grain_and_come_from_it(lighthouse):
    """The sets of global batches are those of Grain's own iterator, in both directions."""
    grain = pytest.importorskip("grain", reason="grain is not installed: pip install -e '.[grain]'")
    experimental = pytest.importorskip("grain.experimental")
    ds = grain.MapDataset.source(np.arange(LENGTH)).shuffle(seed=3).repeat(EPOCHS)

    def theirs(size: int) -> list[Any]:
        return [experimental.ElasticIterator(ds, size, grain.sharding.ShardOptions(one, 2)) for one in range(2)]

    with manager(lighthouse, "a") as m:
        ours = ElasticIterator(ds, m, 4)
        shards = theirs(4)
        for _ in range(2):
            assert set(next(ours).tolist()) == {int(one) for shard in shards for one in next(shard)}
            assert m.should_commit()
        state = ours.get_state()
        assert state == {**shards[0].get_state(), "step": 2}
        resumed = theirs(6)
        for shard in resumed:
            shard.set_state(state)
        expected = {int(one) for shard in resumed for one in next(shard)}
        at_14 = resumed[0].get_state()
    with manager(lighthouse, "b") as m:
        ours = ElasticIterator(ds, m, 6)
        ours.set_state(shards[0].get_state())
        assert set(next(ours).tolist()) == expected
        assert m.should_commit()
        assert ours.get_state() == {**at_14, "step": 1}
        with pytest.raises(ValueError, match=r"must be in \[0, 46\], the length of the dataset"):
            ours.set_state({"global_next_index": 47})


def test_a_grain_dataset_with_gaps_or_without_random_access_is_refused(lighthouse):
    grain = pytest.importorskip("grain", reason="grain is not installed: pip install -e '.[grain]'")
    ds = grain.MapDataset.source(np.arange(LENGTH))
    with manager(lighthouse, "a") as m:
        with pytest.raises(TypeError, match=r"no random access: pass the grain.MapDataset before to_iter_dataset"):
            ElasticIterator(ds.to_iter_dataset(), m, BATCH)
        batches = ElasticIterator(ds.filter(lambda index: index != 2), m, BATCH)
        with pytest.raises(ValueError, match="element 2 of the Grain dataset is missing: filter"):
            next(batches)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_stream_goes_on_in_the_middle_of_an_epoch_and_reads_no_more_than_it_must(lighthouse, resumes):
    read = list[int]()

    def counted(one: dict[str, int]) -> dict[str, int]:
        read.append(one["index"])
        return one

    def build(m: Manager, size: int) -> StreamLoader:
        return StreamLoader(stream_of(shuffled=False).map(counted), LENGTH, m, size, resumes=resumes)

    def take(loader: StreamLoader, m: Manager, steps: int) -> list[int]:
        taken = list[int]()
        for _, batch in zip(range(steps), loader, strict=False):
            taken += batch["index"].tolist()
            assert m.should_commit()
        return taken

    saved: dict[str, Any] = {}
    for name, size, expected in (("a", 5, range(5)), ("b", 9, range(5, 14)), ("c", 9, range(14, LENGTH))):
        with manager(lighthouse, name) as m:
            loader = build(m, size)
            if saved:
                loader.load_state_dict(saved)
            read.clear()
            assert take(loader, m, 1) == list(expected)
            assert read[0] == (expected.start if resumes else 0)
            saved = loader.state_dict()
            assert ("stream" in saved) == resumes
            if name == "c":
                assert (loader.sampler.epoch, loader.sampler.sample) == (1, 0)
                assert take(loader, m, 1) == list(range(size)), "the next epoch begins at its beginning"


def test_a_state_of_a_stream_that_is_saved_again_before_a_batch_was_read_is_that_of_its_place(lighthouse):
    """As a job does that is stopped right after its start."""
    saved: dict[str, Any] = {}
    for name in "abcd":
        with manager(lighthouse, name) as m:
            loader = StreamLoader(stream_of(shuffled=False), LENGTH, m, BATCH, resumes=True)
            if saved:
                loader.load_state_dict(saved)
            if name in "ad":
                first = 0 if name == "a" else BATCH
                assert next(iter(loader))["index"].tolist() == list(range(first, first + BATCH))
                assert m.should_commit()
            saved = loader.state_dict()


def test_a_stream_that_is_divided_or_too_short_is_refused(lighthouse):
    split_dataset_by_node = importlib.import_module(f"{hugging_face().__name__}.distributed").split_dataset_by_node
    stream = stream_of(shuffled=False)
    with manager(lighthouse, "a") as m:
        with pytest.raises(ValueError, match="divided by split_dataset_by_node"):
            StreamLoader(split_dataset_by_node(stream, 0, 2), LENGTH, m, BATCH)
        loader = StreamLoader(stream, LENGTH + 1, m, LENGTH + 1)
        with pytest.raises(ValueError, match=r"the stream ended after 23 examples, and length=24; pass the number"):
            next(iter(loader))
