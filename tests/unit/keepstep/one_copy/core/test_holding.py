from __future__ import annotations

from keepstep.one_copy.core.holding import Holding, Shard, State
from keepstep.one_copy.core.world import Seat, World

WORLD = World(1, 1, (Seat("a", "host"),), 1)


def test_a_step_leads_to_a_state_with_the_name_of_its_quorum() -> None:
    assert State(4, 1).after(3) == State(5, 3)
    assert State(4, "resumed:2:3").after(5) == State(5, "resumed:2:5")


def test_a_state_of_a_resumed_job_is_worth_more_than_a_later_one_before_it() -> None:
    assert State(2, "resumed:7:7").worth > State(9, 6).worth
    assert State(3, 2).worth > State(3, 1).worth


def test_gradients_lead_on_only_after_a_vote() -> None:
    assert Shard(WORLD, 0, State(4, 1)).next_state is None
    assert Shard(WORLD, 0, State(4, 1), voted=3).next_state == State(5, 3)


def test_a_holding_names_the_seat_of_its_member() -> None:
    assert Holding("a", 0, "host", "").seat == Seat("a", "host")
