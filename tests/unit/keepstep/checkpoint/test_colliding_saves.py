"""Saves to a directory that fail, come too late, or meet another save there."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointDamaged, CheckpointError
from keepstep.checkpoint.places import directory, rank_files
from keepstep.checkpoint.places.directory import DirectoryTarget
from keepstep.checkpoint.places.durable_files import create_whole, write_whole
from keepstep.checkpoint.planning import RankLayout
from keepstep.checkpoint.saving import open_target, pack_of, save_facts
from keepstep.checkpointing import UnsupportedValue
from keepstep.connection.deadline import Deadline
from keepstep.state.errors import TransferTimeout
from keepstep.state.flattening import flatten
from keepstep.state.local_parts import local_parts
from tests.support.checkpoints.checkpoint_ends import eventually

TIMEOUT = timedelta(seconds=30)


def save_of(place, value, *, overwrite=False):
    """Return a save that has begun, and its pack."""
    target = open_target(place, save_facts(0, 1, 0, "durable", overwrite=overwrite), timeout=TIMEOUT)
    target.begin()
    return target, pack_of(local_parts(flatten({"w": torch.full((3000,), value)})))


def loaded(place):
    state = {"w": torch.zeros(3000)}
    checkpoint.load(state, place, timeout=TIMEOUT)
    return state["w"].unique().tolist()


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_the_commit_of_an_overwriting_save_is_never_taken_for_that_of_another_one(tmp_path):
    record = tmp_path / directory.RECORD
    for value in (1.0, 2.0):
        target, pack = save_of(tmp_path, value, overwrite=True)
        replaced = record.read_bytes() if record.exists() else b""
        target.store(pack)
        target.commit()
    committed = record.read_bytes()

    def commit_again():
        for number in range(1000):
            write_whole(record, replaced if number % 2 else committed, sync=False)

    with ThreadPoolExecutor(1) as pool:
        commits = pool.submit(commit_again)
        while not commits.done():
            target._check_uncommitted()
        commits.result()


def test_a_save_that_is_late_leaves_the_committed_checkpoint_as_it_is(tmp_path):
    early, pack = save_of(tmp_path, 1.0)
    late, other = save_of(tmp_path, 2.0)
    early.store(pack)
    early.commit()
    with pytest.raises(
        CheckpointError, match=r"Checkpoint already exists: .* has a committed one, which is not overwritten"
    ):
        late.store(other)
    late.fail("too late")
    assert loaded(tmp_path) == [1.0]
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint.json", "manifest-0", "pack-0"}


@pytest.mark.parametrize("world", [1, 3])
def test_a_save_that_overwrites_replaces_the_checkpoint_also_of_more_ranks(tmp_path, world):
    with ThreadPoolExecutor(4) as pool:
        for ranks, value in ((4, 1.0), (world, 2.0), (world, 3.0)):
            state = {"w": torch.full((3000,), value), "more": torch.ones(10)}
            save = partial(checkpoint.save, state, tmp_path, world_size=ranks, overwrite=True, timeout=TIMEOUT)
            assert [one.result() for one in [pool.submit(save, rank=rank) for rank in range(ranks)]] == [None] * ranks
            assert loaded(tmp_path) == [value]
            kept = {f"{kind}-{rank}" for kind in ("manifest", "pack") for rank in range(ranks)}
            assert {one.name for one in tmp_path.iterdir()} == {"checkpoint.json"} | kept


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_record_is_named_with_its_remedy_and_can_be_overwritten(tmp_path, record):
    checkpoint.save({"w": torch.zeros(3000)}, tmp_path)
    (tmp_path / "checkpoint.json").write_bytes(record)
    for call in (loaded, partial(checkpoint.save, {"w": torch.zeros(3000)})):
        with pytest.raises(CheckpointDamaged, match=r"checkpoint.json is damaged: .*; load another .*overwrite=True"):
            call(tmp_path)
    for value in (record, b"{}", b'{"format": "other"}'):
        (tmp_path / "checkpoint.json").write_bytes(value)
        checkpoint.save({"w": torch.ones(3000)}, tmp_path, overwrite=True)
        assert loaded(tmp_path) == [1.0]


def test_the_earlier_checkpoint_is_whole_until_the_commit_of_one_that_overwrites_it(tmp_path):
    checkpoint.save({"w": torch.ones(3000)}, tmp_path)
    target = open_target(tmp_path, save_facts(0, 1, 0, "durable", overwrite=True), timeout=TIMEOUT)
    target.begin()
    target.store(pack_of(local_parts(flatten({"w": torch.full((3000,), 2.0)}))))
    assert loaded(tmp_path) == [1.0]
    target.fail("killed")
    assert loaded(tmp_path) == [1.0]
    with pytest.raises(UnsupportedValue):
        checkpoint.save({"w": object()}, tmp_path, overwrite=True)
    assert loaded(tmp_path) == [1.0]
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint.json", "manifest-0", "pack-0"}


def test_of_two_saves_that_overwrite_one_checkpoint_the_later_one_is_refused(tmp_path):
    checkpoint.save({"w": torch.zeros(3000)}, tmp_path)
    late = open_target(tmp_path, save_facts(0, 1, 0, "durable", overwrite=True), timeout=TIMEOUT)
    late.begin()
    checkpoint.save({"w": torch.ones(3000)}, tmp_path, overwrite=True)
    with pytest.raises(CheckpointError, match=r"another save has committed since this one began, .* let one save end"):
        late.store(pack_of(local_parts(flatten({"w": torch.full((3000,), 2.0)}))))
    late.fail("too late")
    assert loaded(tmp_path) == [1.0]


def test_of_two_saves_that_overwrite_one_checkpoint_at_the_same_instant_one_is_committed_whole(tmp_path, monkeypatch):
    checkpoint.save({"w": torch.zeros(3000)}, tmp_path)
    first, second = (save_of(tmp_path, value, overwrite=True) for value in (1.0, 2.0))
    for target, pack in (first, second):
        target.store(pack)
    others = []
    with ThreadPoolExecutor(1) as pool:

        def write_whole(path, data, **how):
            if path.name == "checkpoint.json" and not others:
                others.append(pool.submit(error_of, second[0].commit))
                wait(others, 0.3)  # for a commit that does not wait for this one
            usual(path, data, **how)

        usual = directory.write_whole
        monkeypatch.setattr(directory, "write_whole", write_whole)
        first[0].commit()
        assert "another save has committed since this one began" in others[0].result(30)
    second[0].fail("too late")
    assert loaded(tmp_path) == [1.0]
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint.json", "manifest-0", "pack-0"}


def test_the_lock_of_a_save_that_was_killed_delays_the_next_one_but_not_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "OLD_SECONDS", 0.1)
    for value, overwrite in ((1.0, False), (2.0, True)):
        (tmp_path / "checkpoint.json.lock").touch()
        checkpoint.save({"w": torch.full((3000,), value)}, tmp_path, overwrite=overwrite, timeout=TIMEOUT)
        assert loaded(tmp_path) == [value]
        assert {one.name for one in tmp_path.iterdir()} == {"checkpoint.json", "manifest-0", "pack-0"}


def test_a_rank_that_is_lost_after_the_commit_delays_the_others_but_not_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_files, "END_SECONDS", 0.2)
    parts = local_parts(flatten({"w": torch.ones(3000)}))
    lost = open_target(tmp_path, save_facts(1, 2, 0, "durable"), timeout=TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(checkpoint.save, {"w": torch.ones(3000)}, tmp_path, rank=0, world_size=2, timeout=TIMEOUT)
        lost.begin()
        lost.exchange(RankLayout.of(parts, {}).pack())
        lost.store(pack_of({}))
        saving.result()
    assert loaded(tmp_path) == [1.0]
    assert not (tmp_path / ".saving").exists()
    lost.commit()
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    with pytest.raises(CheckpointError, match="was renamed or deleted before rank 1 saw a commit"):
        lost.commit()
    moved.rename(tmp_path)


def test_rank_0_that_is_killed_after_the_commit_takes_nothing_back(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_files, "END_SECONDS", 0.2)
    monkeypatch.setattr(DirectoryTarget, "_tidy", lambda *_: None)
    with ThreadPoolExecutor(2) as pool:
        save = partial(checkpoint.save, {"w": torch.ones(3000)}, tmp_path, world_size=2, timeout=TIMEOUT)
        assert [one.result() for one in [pool.submit(save, rank=rank) for rank in range(2)]] == [None, None]
    assert loaded(tmp_path) == [1.0]


def test_of_two_saves_that_commit_at_the_same_instant_one_wins_and_the_error_names_it(tmp_path, monkeypatch):
    winner, pack = save_of(tmp_path, 1.0)
    loser, other = save_of(tmp_path, 2.0)
    winner.store(pack)

    def at_the_last_moment(usual):
        def name_file(source, target, **how):
            if Path(target).name == "checkpoint.json":
                monkeypatch.undo()
                loser.store(other)
            return usual(source, target, **how)

        return name_file

    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, at_the_last_moment(getattr(os, name)))
    winner.commit()
    with pytest.raises(CheckpointError, match=rf"is not overwritten: of step 0, saved by .*:{os.getpid()} at 20"):
        loser.commit()
    loser.fail("too late")
    assert loaded(tmp_path) == [1.0]
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint.json", "manifest-0", "pack-0"}


def test_without_hard_links_a_late_save_is_refused_too(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    checkpoint.save({"w": torch.ones(3000)}, tmp_path)
    assert not create_whole(tmp_path / "checkpoint.json", b"{}")
    with pytest.raises(CheckpointError, match=r"not overwritten: .*\. If the job went back .* delete the abandoned"):
        checkpoint.save({"w": torch.zeros(3000)}, tmp_path)
    assert loaded(tmp_path) == [1.0]


def rank_of_two(place, rank, step=0):
    target = DirectoryTarget(place, save_facts(rank, 2, step, "durable"), Deadline(30, "late"))
    target.begin()
    return target


def error_of(call, *arguments):
    try:
        call(*arguments)
    except CheckpointError as error:
        return str(error)
    return ""


def test_two_saves_of_several_ranks_that_meet_in_a_directory_are_not_committed(tmp_path, monkeypatch):
    ours, theirs, shared = rank_of_two(tmp_path, 0), rank_of_two(tmp_path, 0), rank_of_two(tmp_path, 1)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(error_of, ours.exchange, b"")
        eventually((tmp_path / ".saving" / "layout-0").exists)
        usual = Path.unlink

        def unlink(path, **how):
            usual(path, **how)
            if path.name == "layout-0":
                wait([first], 30)  # until the first save has seen that its layout is gone, and has said so

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            theirs.begin()
        second = pool.submit(error_of, theirs.exchange, b"")
        assert "another process saves to" in first.result(30)
        ours.fail("as it says")
        assert not error_of(shared.exchange, b"")
        assert not second.result(30)
        for one in (theirs, shared):
            one.store(pack_of({}))
        commit = pool.submit(error_of, shared.commit)
        message = error_of(theirs.commit)
        assert "was not saved, because two saves have met there: another process saves to" in message
        theirs.fail(message)
        assert "two saves have met there" in commit.result(30)
        shared.fail("aborted")
    assert {one.name for one in tmp_path.iterdir()} == {".saving"}


def test_ranks_that_save_different_steps_are_refused(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        targets = [rank_of_two(tmp_path, rank, step=7 + rank) for rank in range(2)]
        for error in pool.map(error_of, [one.exchange for one in targets], [b"", b""]):
            assert "are at different steps: rank 0 at 7, rank 1 at 8" in error


def test_an_error_of_an_earlier_attempt_does_not_abort_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_files, "STALE_SECONDS", 0.0)
    rank_of_two(tmp_path, 1).fail("of yesterday")
    os.utime(tmp_path / ".saving" / "failed-1", (1.0, 1.0))
    with ThreadPoolExecutor(1) as pool:
        first = rank_of_two(tmp_path, 0)
        waiting = pool.submit(error_of, first.exchange, b"")
        eventually((tmp_path / ".saving" / "layout-0").exists)
        assert not wait([waiting], 0.1).done  # it looks every few milliseconds
        late = rank_of_two(tmp_path, 1)
        assert not error_of(late.exchange, b"")
        assert not waiting.result(30)


def test_a_reader_keeps_no_pack_open(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        saving = [
            pool.submit(checkpoint.save, {f"w{rank}": torch.ones(9)}, tmp_path, rank=rank, world_size=4)
            for rank in range(4)
        ]
        for one in saving:
            one.result(30)
    before = open_files()
    reader = checkpoint.open_reader(tmp_path, timeout=TIMEOUT)
    stored = checkpoint.StoredCheckpoint(reader)
    assert all(stored.tensor(f"w{rank}").equal(torch.ones(9)) for rank in range(4))
    assert open_files() == before
    reader.close()


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_save_removes_the_folders_that_it_made(tmp_path, exists):
    (tmp_path / "there").mkdir()
    place = tmp_path / "there" if exists else tmp_path / "a" / "b"
    with pytest.raises(UnsupportedValue):
        checkpoint.save({"w": object()}, place)
    assert [one.name for one in tmp_path.rglob("*")] == ["there"]


def test_a_save_that_fails_while_it_writes_leaves_no_file(tmp_path):
    target, pack = save_of(tmp_path / "c", 1.0)
    target._deadline = Deadline(-1, "late")
    with pytest.raises(TransferTimeout) as caught:
        target.store(pack)
    target.fail(f"{caught.value} \udcff")  # a name of a file that is not UTF-8
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_a_tensor_without_dense_memory_is_named_by_its_key(tmp_path, tensor):
    for save in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(UnsupportedValue, match=r"^layer\.weight is a tensor of .*: expected a dense tensor"):
            save({"layer": {"weight": tensor}}, tmp_path / "c")


def test_an_error_with_any_characters_reaches_the_other_ranks(tmp_path):
    facts = save_facts(1, 2, 0, "durable")
    target = DirectoryTarget(tmp_path, facts, Deadline(30, "late"))
    target.begin()
    target.fail("no file \udcff")
    assert (tmp_path / ".saving" / "failed-1").read_text() == "no file \\udcff"


def test_a_save_in_the_background_cannot_be_cancelled(tmp_path):
    saving = checkpoint.async_save({"w": torch.ones(3)}, tmp_path / "c")
    assert not saving.cancel()
    saving.result(30)
    assert (tmp_path / "c" / "checkpoint.json").exists()
