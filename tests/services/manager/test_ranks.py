"""Several ranks in one group: each is a thread of this process with a Manager, and they meet in a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from keepstep_mesh.errors import KeepstepError
from tests.services.manager.groups import SECOND, Flaky, manager, place_to_meet, together, until_connected


def what_comes_of(work: Callable[[], Any]) -> Any:
    """Its result, or the error that it raises."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return error


@pytest.mark.parametrize("name", [None, "g"])
def test_ranks_without_a_name_form_the_group_that_rank_0_names(lighthouse, monkeypatch, name):
    monkeypatch.delenv("REPLICA_GROUP_ID", raising=False)
    place = place_to_meet()

    def rank(number: int) -> tuple[str, bool]:
        with manager(lighthouse, name if number == 0 else None, rank=number, **place) as m:
            m.start_quorum()
            return m.replica_id(), m.should_commit()

    first, second = together(lambda: rank(0), lambda: rank(1))
    assert first == second
    assert first[0].partition(":")[0] == (name or first[0].partition(":")[0])
    assert first[1]


def test_a_rank_that_meets_another_group_in_its_store_says_so(lighthouse):
    place = place_to_meet()
    other_came = threading.Event()

    def rank_0() -> None:
        with manager(lighthouse, "a", rank=0, **place):
            assert other_came.wait(60)

    def rank_1() -> Any:
        try:
            with manager(lighthouse, "b", rank=1, **place):
                return None
        except KeepstepError as error:
            return str(error)
        finally:
            other_came.set()

    assert "rank 1 of b found rank 0 of a:" in together(rank_0, rank_1)[1]


def test_a_missing_rank_is_a_timeout(lighthouse):
    place = place_to_meet()

    def come(rank: int, lighthouse: str, limit: timedelta) -> Any:
        return what_comes_of(lambda: manager(lighthouse, "a", rank=rank, connect_timeout=limit, **place).__enter__())

    alone = come(1, lighthouse, SECOND)
    assert isinstance(alone, TimeoutError)
    assert str(place["store_port"]) in str(alone)
    without_lighthouse, without_rank_0 = together(
        lambda: come(0, "http://127.0.0.1:9", 4 * SECOND), lambda: come(1, lighthouse, 2 * SECOND)
    )
    assert isinstance(without_lighthouse, TimeoutError)
    assert isinstance(without_rank_0, TimeoutError)
    assert "rank 1 found no address of rank 0 of its group" in str(without_rank_0)


@pytest.mark.parametrize("going", [0, 1])
def test_a_rank_that_goes_in_the_middle_of_a_step_takes_the_others_along_at_once(lighthouse, ended, going):
    place = place_to_meet()
    in_step = threading.Barrier(2)

    def rank(number: int) -> tuple[str, int] | None:
        with manager(lighthouse, "g", rank=number, **place) as m:
            m.start_quorum()
            m.wait_quorum()
            in_step.wait(30)
            return None if number == going else ended.get(timeout=30)

    assert together(lambda: rank(0), lambda: rank(1))[1 - going] == (f"rank {going} ended in the middle of a step", 75)


def test_a_rank_that_goes_between_two_steps_ends_nobody(lighthouse, ended):
    place = place_to_meet()
    gone = threading.Event()

    def rank(number: int) -> Any:
        with manager(lighthouse, "g", rank=number, **place) as m:
            m.start_quorum()
            assert m.should_commit()
            if number == 1:
                assert gone.wait(30)
                m.start_quorum()
                return what_comes_of(m.wait_quorum)
        gone.set()
        return None

    error = together(lambda: rank(0), lambda: rank(1))[1]
    assert isinstance(error, KeepstepError)
    assert ended.empty()


def test_a_rank_whose_step_fails_for_another_rank_is_told_so(lighthouse):
    place = place_to_meet()

    def rank(number: int) -> tuple[bool, str]:
        with manager(lighthouse, "g", rank=number, **place) as m:
            m.start_quorum()
            m.wait_quorum()
            if number == 1:
                m.report_error(RuntimeError("out of memory"))
            return m.should_commit(), str(m.errored())

    both = together(lambda: rank(0), lambda: rank(1))
    assert both == [(False, "another rank of this group voted no"), (False, "out of memory")]


@pytest.mark.parametrize("torn", [True, False], ids=["half written", "untouched"])
def test_a_rank_that_cannot_heal_costs_its_group_one_step_and_then_all_its_ranks_heal(lighthouse, ended, torn):
    ahead, healed = threading.Event(), threading.Event()
    over: list[bool] = []
    veterans = threading.Barrier(2, lambda: over.append(healed.is_set()))
    places = {"a": place_to_meet(), "b": place_to_meet()}

    def veteran(rank: int) -> None:
        with manager(lighthouse, "a", {"w": torch.full((2,), 7.0)}, rank=rank, **places["a"]) as m:
            while veterans.wait(30) >= 0 and not over[-1]:
                m.start_quorum()
                m.allreduce(torch.ones(1)).wait()
                m.should_commit()
                if m.current_step() == 3:
                    ahead.set()

    def joiner(rank: int) -> tuple[list[bool], bool, list[float]]:
        assert ahead.wait(30)
        state, failures = {"w": torch.zeros(2)}, []

        def load(new: dict[str, Any]) -> None:
            if torn and rank == 1 and not failures:
                failures.append(1)
                raise OSError("a hiccup")
            state.update(new)

        options: dict[str, Any] = {}
        if not torn and rank == 1:
            options["checkpoint_transport"] = Flaky(timeout=20 * SECOND, num_chunks=0, hostname="127.0.0.1")
        with manager(lighthouse, "b", rank=rank, **places["b"], **options) as m:
            m.set_state_dict_fns(load, lambda: dict(state))
            committed = []
            while committed.count(True) < 2:
                m.start_quorum()
                m.allreduce(torch.ones(1)).wait()
                committed.append(m.should_commit())
            healed.set()
            return committed, m.current_step() > 3, state["w"].tolist()

    *_, first, second = together(lambda: veteran(0), lambda: veteran(1), lambda: joiner(0), lambda: joiner(1))
    assert first == second == ([False, True, True], True, [7.0, 7.0])
    assert ended.empty()


def test_a_group_with_a_torn_rank_and_nobody_to_heal_from_ends(lighthouse, ended):
    place = place_to_meet()
    both = threading.Barrier(2)

    def rank(number: int) -> Any:
        with manager(lighthouse, "g", rank=number, **place) as m:
            m.start_quorum()
            assert m.should_commit()
            if number == 1:
                m.mark_torn()

            def step() -> bool:
                m.start_quorum()
                return m.should_commit()

            error = what_comes_of(step)
            both.wait(30)
            return str(error)

    for error in together(lambda: rank(0), lambda: rank(1)):
        assert "no healthy group to heal from" in error


@pytest.mark.parametrize("behind", [None, 0, 1])
def test_ranks_that_withdraw_their_request_finish_without_it(lighthouse, behind):
    place, both_asked, other_left = place_to_meet(), threading.Barrier(2), threading.Event()

    def rank(number: int) -> int:
        with manager(lighthouse, "a", rank=number, **place) as m:
            m.background.use(2, SECOND)  # no other group comes
            m.background.request()
            until_connected(lighthouse, "a", asked=True)
            both_asked.wait(30)
            if number == behind:  # in its last local steps, when the other rank has ended its loop
                assert other_left.wait(30)
                m.background.request()
            m.background.withdraw()
            other_left.set()
            return m.finish(30 * SECOND).groups

    assert together(lambda: rank(0), lambda: rank(1)) == [1, 1]
