"""Values that the ranks of one group must have in common, and decisions of one rank for all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.group.ranks.merging import DisagreeError, merge_asks
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.membership import PUBLISHED, TO_PUBLISH, UNPUBLISHED


def merge(*asks: RankAsk) -> RankAsk:
    return merge_asks(dict(enumerate(asks)), "a:1")


def ask(*, allow_heal: bool = True, settings: str = "", publish: str = "") -> RankAsk:
    final = publish != ""
    return RankAsk(1, 3, 7, False, 0, 1000, allow_heal=allow_heal, settings=settings, final=final, publish=publish)


def test_ranks_with_different_settings_are_told_which_one_differs():
    with pytest.raises(DisagreeError, match="setting init_sync: True in rank 1, False in rank 2"):
        merge(ask(), ask(settings="init_sync True"), ask(settings="init_sync False"))


def test_the_settings_of_a_group_are_those_that_any_rank_knows():
    assert merge(ask(), ask(settings="init_sync True")).settings == "init_sync True"
    assert merge(ask(), ask()).settings == ""


def test_ranks_with_shards_of_one_model_may_be_a_step_apart():
    """Some have learned that the step was committed when a member was lost. The others come to that state."""
    behind, ahead = RankAsk(1, 3, 7, False, 1, 1000, sharded=True), RankAsk(1, 4, 7, False, 0, 1000, sharded=True)
    merged = merge(behind, replace(ahead, final=True))
    assert (merged.step, merged.lineage, merged.commit_failures) == (4, 7, 1)
    assert merged.final, "no group takes a step beyond the last one"
    with pytest.raises(DisagreeError, match="rank 0 is at step 3"):
        merge(replace(behind, sharded=False), replace(ahead, sharded=False))


def test_one_rank_that_allows_no_healing_decides_for_its_group():
    assert merge(ask(), ask()).allow_heal
    assert not merge(ask(), ask(allow_heal=False)).allow_heal


def test_a_group_publishes_its_final_state_if_all_its_ranks_do():
    assert merge(ask(publish=PUBLISHED), ask(publish=TO_PUBLISH)).publish == TO_PUBLISH
    with pytest.raises(DisagreeError, match=r"ranks \[0\] call finish\(publish=True\) and ranks \[1\] call it without"):
        merge(ask(publish=PUBLISHED), ask(publish=UNPUBLISHED))
