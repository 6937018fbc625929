"""Groups of one job agree on every setting that decides the arithmetic, and on whether a round heals."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import keepstep.group.agreement
from keepstep import Manager, WorldSizeMode
from keepstep.runtime.exits import GroupFailedExit, MismatchExit
from tests.services.manager.groups import SECOND, manager, place_to_meet, together

SPARES = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2}


def step(m: Manager, state: dict[str, Any], gradient: float, **options: Any) -> bool:
    m.start_quorum(**options)
    total = torch.full((3,), gradient)
    m.allreduce(total).wait()
    committed = m.should_commit()
    if committed:
        state["w"] = state["w"] + total
    return committed


@pytest.mark.parametrize(
    ("usual", "odd", "named"),
    [
        ({}, {"use_async_quorum": False}, "setting use_async_quorum: False in odd, True in"),
        ({"init_sync": False}, {}, "setting init_sync: True in odd, False in"),
        (SPARES, {"min_replica_size": 2}, "setting world_size_mode: DYNAMIC in odd, FIXED_WITH_SPARES of 2 in"),
        (
            SPARES,
            {**SPARES, "min_replica_size": 3},
            "setting world_size_mode: FIXED_WITH_SPARES of 3 in odd, FIXED_WITH_SPARES of 2 in",
        ),
        ({}, {"arithmetic": 999}, f"setting arithmetic: 999 in odd, {keepstep.group.agreement.ARITHMETIC} in"),
    ],
    ids=["use_async_quorum", "init_sync", "world_size_mode", "min_replica_size", "arithmetic"],
)
def test_of_three_groups_the_one_with_another_setting_is_refused_and_the_others_go_on_equal(
    lighthouse, monkeypatch, usual, odd, named
):
    trained, refused, both = threading.Event(), threading.Event(), threading.Barrier(2)
    last: list[int] = []

    def agreeing(name: str, gradient: float) -> list[float]:
        state = {"w": torch.zeros(3)}
        with manager(lighthouse, name, state, **{"min_replica_size": 2, **usual}) as m:
            both.wait(30)
            while not last or m.current_step() < last[0]:
                step(m, state, gradient)
                if m.current_step() == 3:
                    trained.set()
                if name == "a" and refused.is_set() and not last:
                    last.append(m.current_step() + 5)  # b is one step away at most
            both.wait(30)
            return state["w"].tolist()

    def differing() -> tuple[str, int]:
        assert trained.wait(30)
        options = dict(odd)
        if (version := options.pop("arithmetic", None)) is not None:
            monkeypatch.setattr(keepstep.group.agreement, "ARITHMETIC", version)
        state = {"w": torch.ones(3)}
        try:
            with manager(lighthouse, "odd", state, **options) as m:
                with pytest.raises(MismatchExit) as error:
                    step(m, state, 100.0)
                return str(error.value), m.current_step()
        finally:
            refused.set()

    of_a, of_b, (said, committed) = together(lambda: agreeing("a", 1.0), lambda: agreeing("b", 3.0), differing)
    assert named in said
    assert "stop and restart all groups" in said
    assert committed == 0
    assert of_a == of_b
    assert of_a[0] % 2 == 0, "the average of the two that agree, in every step"


SCRIPT = """
import sys, torch
from keepstep import Manager, ProcessGroupGloo
manager = Manager(ProcessGroupGloo(), lighthouse_addr=sys.argv[1], replica_id="b", use_async_quorum=False)
manager.start_quorum()
"""


def test_a_refused_process_ends_with_one_sentence_and_an_exit_code_that_no_launcher_restarts(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        assert m.should_commit()
        refused = subprocess.run(
            [sys.executable, "-c", SCRIPT, lighthouse], capture_output=True, text=True, timeout=60, check=False
        )
        m.start_quorum()
        assert m.should_commit(), "the group that was there goes on"
    assert refused.returncode == 78
    said = [line for line in refused.stderr.splitlines() if line.startswith("keepstep: ")]
    assert len(said) == 1
    assert said[0].startswith(
        "keepstep: this group does not fit its job: setting use_async_quorum: False in b, True in a;"
    )
    assert said[0].endswith("its ranks end (exit 78)")
    assert "Traceback" not in refused.stderr


def test_a_rank_with_another_setting_than_rank_0_ends_its_group_with_the_setting_named(lighthouse, ended):
    meet = place_to_meet()

    def rank(number: int) -> str:
        with manager(lighthouse, "a", rank=number, use_async_quorum=number == 0, init_sync=False, **meet) as m:
            with pytest.raises(GroupFailedExit) as error:
                m.start_quorum()
                m.wait_quorum()
            return str(error.value)

    for said in together(lambda: rank(0), lambda: rank(1)):
        assert "setting use_async_quorum: True in rank 0, False in rank 1" in said


def rounds(lighthouse: str, act: Callable[[str, Manager, threading.Barrier], Any]) -> list[Any]:
    """Three groups in step; ``act`` by each."""
    ready = threading.Barrier(3)

    def group(name: str) -> Any:
        with manager(lighthouse, name, {"w": torch.zeros(3)}, init_sync=False, min_replica_size=2) as m:
            ready.wait(30)
            return act(name, m, ready)

    return together(*(lambda name=name: group(name) for name in "abc"))


def test_all_members_take_one_divisor_in_a_round_in_which_only_one_of_them_allows_no_heal(lighthouse):
    def act(name: str, m: Manager, ready: threading.Barrier) -> tuple[Any, ...]:
        behind = name == "c"
        if not behind:
            m.load_state_dict({"step": 5, "batches_committed": 15, "lineage": 5})
        m.start_quorum(allow_heal=name != "a")
        total = torch.full((3,), 12.0 if behind else 3.0)
        assert m.allreduce(total).wait()
        facts = m.num_participants(), m.is_participating(), total.tolist()
        ready.wait(30)
        return (*facts, m.should_commit())

    assert rounds(lighthouse, act) == [(3, True, [6.0] * 3, True)] * 3


def test_a_group_that_is_behind_heals_in_the_round_after_one_without_healing(lighthouse):
    def act(name: str, m: Manager, ready: threading.Barrier) -> tuple[list[int], int]:
        if name != "c":
            m.load_state_dict({"step": 5, "batches_committed": 15, "lineage": 5})
        counted = []
        for allow_heal in (name != "b", True, True):
            m.start_quorum(allow_heal=allow_heal)
            m.allreduce(torch.zeros(3)).wait()
            counted.append(m.num_participants())
            ready.wait(30)
            assert m.should_commit(), m.errored()
        return counted, m.current_step()

    assert rounds(lighthouse, act) == [([3, 2, 3], 8)] * 3


def test_a_steady_round_without_healing_is_one_for_all(lighthouse):
    def act(name: str, m: Manager, ready: threading.Barrier) -> list[tuple[int, bool]]:
        seen = []
        for number in range(4):
            m.start_quorum(allow_heal=not (name == "b" and number == 2), timeout=20 * SECOND)
            m.wait_quorum()
            assert m.steps.attempt is not None
            seen.append((m.num_participants(), m.steps.attempt._quorum.allow_heal))
            ready.wait(30)
            assert m.should_commit()
        return seen

    assert rounds(lighthouse, act) == [[(3, True), (3, True), (3, False), (3, True)]] * 3
