"""Failures after the commit of a save, and how often a load opens its checkpoint."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch

from keepstep.checkpoint.places.at_relay import RelayTarget
from keepstep.checkpoint.places.directory import DirectorySource, DirectoryTarget
from keepstep.sharded import CheckpointingException, ShardedObject, ShardedTensor, load, load_plain_tensors, save
from keepstep_megatron.stages import MAX_STAGE_BYTES, Ranks, StageFailed
from tests.support.services.relay_driver import relay


def state(value):
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value)),
        "o": ShardedObject("o", value, (1,), (0,)),
        "step": value,
    }


async def test_an_error_after_the_commit_says_that_the_checkpoint_is_complete(tmp_path, monkeypatch) -> None:
    """A rank is lost. Gathering fails then on the others, here on the only one."""
    usual, committed = Ranks._gather, []

    def commits(kind):
        commit = kind.commit

        def committing(self):
            commit(self)
            committed.append(self)

        monkeypatch.setattr(kind, "commit", committing)

    def gather(self, mine):
        if committed:
            raise StageFailed(f"{self._what}: a rank was lost: connection closed")
        return usual(self, mine)

    monkeypatch.setattr(Ranks, "_gather", gather)
    commits(DirectoryTarget)
    commits(RelayTarget)
    async with relay(data_dir=tmp_path / "relay") as one:
        for place in (tmp_path / "c", f"{one.address}/v1/jobs/j/checkpoints/c"):
            with pytest.raises(CheckpointingException) as failed:
                await asyncio.to_thread(save, state(7), place)
            assert str(failed.value) == (
                f"{place} is complete, and can be loaded; but the ranks failed after its commit: a rank was lost: "
                f"connection closed"
            )
            committed.clear()
            loaded = await asyncio.to_thread(load, state(0), place)
            assert (loaded["w"].tolist(), loaded["o"], loaded["step"]) == ([7, 7, 7], 7, 7)


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_all"])
def test_a_load_reads_each_manifest_once(tmp_path, monkeypatch, strict) -> None:
    save(state(7), tmp_path / "c")
    usual, opened = DirectorySource.manifests, Counter()

    def manifests(self):
        opened["manifests"] += 1
        return usual(self)

    monkeypatch.setattr(DirectorySource, "manifests", manifests)
    loaded = load(state(0), tmp_path / "c", strict=strict)
    assert (loaded["w"].tolist(), loaded["o"], loaded["step"]) == ([7, 7, 7], 7, 7)
    assert opened["manifests"] == 1
    assert load_plain_tensors(tmp_path / "c")["w"].tolist() == [7, 7, 7]
    assert opened["manifests"] == 2


def test_a_result_that_is_too_large_to_send_is_an_error_and_not_a_wait_of_the_others() -> None:
    with pytest.raises(StageFailed, match=r"this rank has 1073741825 bytes for the other ranks \(limit 1073741824\)"):
        Ranks("x was not saved").stage(lambda: bytes(MAX_STAGE_BYTES + 1))
