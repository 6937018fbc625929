"""torch.distributed.checkpoint saves to keepstep's format and loads from it, in one process."""

from __future__ import annotations

import asyncio
import io
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from keepstep import checkpoint
from keepstep.checkpoint import RelayReader, RelayWriter
from keepstep.checkpoint.torch_errors import join_torch
from keepstep.state.errors import TransferTimeout, UnsupportedValue
from tests.support.services.relay_driver import relay

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


class AppState:
    """The Stateful of the recipe of torch."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def equal(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            equal(value, other[key])
        elif isinstance(value, torch.Tensor):
            assert value.equal(other[key]), key
        else:
            assert value == other[key], key


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_stateful_objects_and_values_come_back(tmp_path, how):
    saved, loaded = AppState(*trained(1)), AppState(*trained(2))
    state = {"app": saved, "step": 7, "schedule": {"rates": [0.1, 0.2], "name": "cosine"}, "pair": (1, torch.ones(2))}
    if how == "save":
        dcp.save(state, storage_writer=RelayWriter(tmp_path / "c"))
    else:
        dcp.async_save(state, storage_writer=RelayWriter(), checkpoint_id=tmp_path / "c").result(60)
    into = {"app": loaded, "step": 0, "schedule": {"rates": [], "name": ""}, "pair": None}
    dcp.load(into, storage_reader=RelayReader(tmp_path / "c"))
    equal(saved.state_dict(), loaded.state_dict())
    assert (into["step"], into["schedule"]) == (7, {"rates": [0.1, 0.2], "name": "cosine"})
    assert into["pair"][0] == 1
    assert into["pair"][1].equal(torch.ones(2))

    ours = {"app": AppState(*trained(3)), "step": 0}
    checkpoint.load(ours, tmp_path / "c")
    equal(saved.state_dict(), ours["app"].state_dict())
    assert ours["step"] == 7


def test_torch_loads_what_keepstep_saved(tmp_path):
    saved, loaded = AppState(*trained(1)), AppState(*trained(2))
    checkpoint.save({"app": saved, "step": 7}, tmp_path / "c")
    into = {"app": loaded, "step": 0}
    dcp.load(into, storage_reader=RelayReader(), checkpoint_id=tmp_path / "c")
    equal(saved.state_dict(), loaded.state_dict())
    assert into["step"] == 7


def test_a_planner_of_ones_own_changes_what_is_stored(tmp_path):
    class HalfPlanner(DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item).half()

    class OwnBytes(DefaultSavePlanner):
        def transform_object(self, write_item, value):
            del write_item, value
            return io.BytesIO(b"own bytes")

    class OwnLoad(DefaultLoadPlanner):
        def load_bytes(self, read_item, value):
            self.original_state_dict[read_item.dest_index.fqn] = value.read()

    dcp.save({"w": torch.full((3,), 1 / 3)}, storage_writer=RelayWriter(tmp_path / "half"), planner=HalfPlanner())
    into = {"w": torch.zeros(3)}
    dcp.load(into, storage_reader=RelayReader(tmp_path / "half"))
    assert into["w"].equal(torch.full((3,), 1 / 3).half().float())

    dcp.save({"s": "x"}, storage_writer=RelayWriter(tmp_path / "own"), planner=OwnBytes())
    read = {"s": "y"}
    dcp.load(read, storage_reader=RelayReader(tmp_path / "own"), planner=OwnLoad())
    assert read == {"s": b"own bytes"}
    dcp.save({"s": "x"}, storage_writer=RelayWriter(tmp_path / "plain"))
    with pytest.raises(CheckpointException, match=r"s is a str, and OwnLoad\.load_bytes expects the bytes"):
        dcp.load(read, storage_reader=RelayReader(tmp_path / "plain"), planner=OwnLoad())


def load_with(function, reader, state, place, planner):
    if function is checkpoint.load:
        function(state, place, planner=planner)
    else:
        function(state, storage_reader=reader(place), planner=planner)


@pytest.mark.parametrize("load", [checkpoint.load, dcp.load])
def test_a_planner_that_does_not_flatten_gets_all_values(tmp_path, load):
    """torch 2.13 with its own storage puts values that are not tensors into a copy, which it drops."""
    state = {"w": torch.ones(2), "inner": {"x": torch.ones(3)}, "step": 5}
    checkpoint.save(state, tmp_path / "c", planner=DefaultSavePlanner(flatten_state_dict=False))
    into = {"w": torch.zeros(2), "inner": None, "step": 0}
    load_with(load, RelayReader, into, tmp_path / "c", DefaultLoadPlanner(flatten_state_dict=False))
    assert (into["w"].tolist(), into["step"], into["inner"]["x"].tolist()) == ([1, 1], 5, [1, 1, 1])


@pytest.mark.parametrize(
    "save", [checkpoint.save, lambda *arguments, **more: checkpoint.async_save(*arguments, **more).result(60)]
)
def test_a_planner_a_storage_and_no_place_in_the_place_of_torch(tmp_path, save):
    class Doubling(DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item) * 2

    class Halving(DefaultLoadPlanner):
        def commit_tensor(self, read_item, tensor):
            assert read_item.dest_index.fqn == "w"
            tensor.div_(2)

    save({"w": torch.ones(3)}, tmp_path / "double", planner=Doubling())
    into = {"w": torch.zeros(3)}
    checkpoint.load(into, tmp_path / "double")
    assert into["w"].tolist() == [2, 2, 2]
    halving = Halving()
    checkpoint.load(into, tmp_path / "double", planner=halving)
    assert into["w"].tolist() == [1, 1, 1]
    assert halving.metadata.version == CURRENT_DCP_VERSION

    save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"))
    dcp.load(into := {"w": torch.zeros(3)}, checkpoint_id=tmp_path / "torch")
    checkpoint.load(other := {"w": torch.zeros(3)}, storage_reader=dcp.FileSystemReader(tmp_path / "torch"))
    assert into["w"].tolist() == other["w"].tolist() == [1, 1, 1]

    for call in (lambda: save({"w": 1}), lambda: save({"w": 1}, planner=Doubling()), lambda: checkpoint.load({"w": 1})):
        with pytest.raises(checkpoint.CheckpointError, match="the checkpoint has no place: pass checkpoint_id, or"):
            call()


def test_errors_are_those_of_torch_too_and_keep_their_class_text_and_fields(tmp_path):
    checkpoint.save({"a": 1, "b": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(CheckpointException) as raised:
        checkpoint.load({"b": torch.zeros(1), "missing": 0}, tmp_path / "c")
    error = raised.value
    assert isinstance(error, checkpoint.MissingKeys)
    assert (error.missing, set(error.available)) == (("missing",), {"a", "b"})
    assert str(error).startswith("the checkpoint does not have missing; ")
    assert [(rank, why[0]) for rank, why in error.failures.items()] == [(0, error)]
    assert type(error).__module__ == "keepstep.state.errors"
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is checkpoint.MissingKeys
    assert (str(copied), copied.missing) == (str(error), error.missing)

    calls = {
        checkpoint.CheckpointNotFound: lambda: checkpoint.load({"a": 1}, tmp_path / "none"),
        checkpoint.CheckpointError: lambda: checkpoint.save({"a": 1}, tmp_path / "c"),
        UnsupportedValue: lambda: checkpoint.save({"a": object()}, tmp_path / "d"),
        checkpoint.CheckpointAborted: lambda: checkpoint.async_save(
            {"a": 1}, tmp_path / "f", rank=0, world_size=2, timeout=timedelta(seconds=0.1)
        ).result(60),
    }
    for kind, call in calls.items():
        with pytest.raises(CheckpointException) as raised:
            call()
        assert isinstance(raised.value, kind)
        assert isinstance(raised.value, Exception)
        assert list(raised.value.failures) == [0]

    join_torch(late := TransferTimeout("not received", torn=True), 3)
    assert isinstance(late, CheckpointException)
    assert isinstance(late, TimeoutError)
    assert (str(late), late.torn, list(late.failures)) == ("not received", True, [3])


def test_a_file_in_memory_comes_back_through_a_planner(tmp_path):
    file = io.BytesIO(b"abc" * 1000)
    file.seek(3)
    dcp.save({"file": file}, storage_writer=RelayWriter(tmp_path / "c"))
    dcp.load(into := {"file": None}, storage_reader=RelayReader(tmp_path / "c"))
    assert (into["file"].tell(), into["file"].getvalue()) == (3, b"abc" * 1000)


def test_a_value_that_cannot_be_stored_is_named_and_nothing_is_pickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            raise AssertionError("it was pickled")

    with pytest.raises(CheckpointException, match=r"\['a.bomb'\] is a .*Bomb, which a checkpoint cannot store"):
        dcp.save({"a": {"bomb": Bomb()}}, storage_writer=RelayWriter(tmp_path / "c"))
    assert not (tmp_path / "c" / "checkpoint.json").exists()


def test_save_state_dict_of_older_scripts_works_with_a_place(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": torch.tensor([1000])}
    with pytest.warns(FutureWarning):
        dcp.save_state_dict(state, storage_writer=RelayWriter(tmp_path / "c"), no_dist=True)
    into = {"model": nn.Linear(4, 2).state_dict(), "optimizer": optimizer.state_dict(), "step": torch.tensor([0])}
    with pytest.warns(FutureWarning):
        dcp.load_state_dict(into, storage_reader=RelayReader(tmp_path / "c"), no_dist=True)
    assert into["step"].item() == 1000
    equal(into["model"], model.state_dict())


def test_a_save_without_collectives_and_process_group(tmp_path):
    dcp.save({"w": torch.arange(3.0)}, storage_writer=RelayWriter(tmp_path / "c"), use_collectives=False)
    into = {"w": torch.zeros(3)}
    dcp.load(into, storage_reader=RelayReader(tmp_path / "c"))
    assert into["w"].equal(torch.arange(3.0))


async def test_ranks_with_plans_of_different_saves_save_together(tmp_path):
    """With ``enable_plan_caching``, ranks whose plan did not change use that of an earlier save."""

    def write(rank, place):
        planner, writer = DefaultSavePlanner(), RelayWriter(place, timeout=timedelta(seconds=20))
        planner.set_up_planner({"w": torch.ones(3)} if rank else {}, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans, _ = planner.create_global_plan([planner.create_local_plan()])
        both = [SavePlan([]), SavePlan([])]
        both[rank] = plans[0]
        plan = writer.prepare_global_plan(both)[rank]  # each rank calls it: nothing that is random may be in a plan
        writer.write_data(planner.finish_plan(plan), planner).wait()

    async with relay(data_dir=tmp_path / "relay") as one:
        for place in (tmp_path / "c", f"{one.address}/v1/jobs/j/checkpoints/c"):
            await asyncio.gather(*(asyncio.to_thread(write, rank, place) for rank in range(2)))
            into = {"w": torch.zeros(3)}
            await asyncio.to_thread(checkpoint.load, into, place)
            assert into["w"].equal(torch.ones(3))


class NamesItsPlace(DefaultSavePlanner):
    """A planner that asks where its save goes, as one that writes files of its own beside it does."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.place = storage_meta.checkpoint_id
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_planners_are_told_the_place_as_by_the_storage_of_torch(tmp_path):
    places, metas = [], []
    for name, writer, reader in (
        ("torch", dcp.FileSystemWriter, dcp.FileSystemReader),
        ("keepstep", RelayWriter, RelayReader),
    ):
        planner, loading = NamesItsPlace(), DefaultLoadPlanner()
        dcp.save({"w": torch.ones(3)}, storage_writer=writer(tmp_path / name), planner=planner)
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader(tmp_path / name), planner=loading)
        places.append(planner.place.name)
        metas.append(str(loading.metadata.storage_meta.checkpoint_id))
    assert places == ["torch", "keepstep"]
    assert metas == [str(tmp_path / "torch"), str(tmp_path / "keepstep")]


def test_an_unknown_place_is_the_error_of_torch_before_any_rank_plans():
    for save, load in (
        (lambda: dcp.save({"w": 1}, checkpoint_id="abc://x"), lambda: dcp.load({"w": 1}, checkpoint_id="abc://x")),
        (
            lambda: dcp.save({"w": 1}, storage_writer=RelayWriter("abc://x")),
            lambda: dcp.load({"w": 1}, storage_reader=RelayReader("abc://x")),
        ),
    ):
        for call in (save, load):
            with pytest.raises(RuntimeError, match="Cannot detect"):
                call()


def test_a_save_with_a_planner_returns_the_metadata_of_torch(tmp_path):
    state = {"w": torch.ones(3), "inner": {"x": [1]}}
    theirs = dcp.save(state, checkpoint_id=tmp_path / "torch")
    ours = checkpoint.save(state, tmp_path / "keepstep", planner=DefaultSavePlanner())
    assert ours is not None
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.state_dict_metadata["w"] == theirs.state_dict_metadata["w"]


@pytest.mark.parametrize("how", ["save", "async_save"])
async def test_a_writer_that_overwrites_replaces_what_a_relay_has(tmp_path, how):
    async with relay(data_dir=tmp_path / "relay") as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c"

        def save(value, *, overwrite):
            state, writer = {"w": torch.full((5,), value), "step": value}, RelayWriter(place, overwrite=overwrite)
            if how == "save":
                dcp.save(state, storage_writer=writer)
            else:
                dcp.async_save(state, storage_writer=writer).result(60)

        def save_again():
            for value in (1.0, 2.0, 3.0):
                save(value, overwrite=True)
                into = {"w": torch.zeros(5), "step": 0.0}
                dcp.load(into, storage_reader=RelayReader(place))
                assert (into["w"].tolist(), into["step"]) == ([value] * 5, value)
            with pytest.raises(CheckpointException, match="already exists"):
                save(4.0, overwrite=False)

        await asyncio.to_thread(save_again)
