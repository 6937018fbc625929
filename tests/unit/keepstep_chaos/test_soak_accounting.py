"""The soak's accounting finds samples that are in no committed step, or in several."""

from __future__ import annotations

from typing import Any

from tests.faults.soak.accounting import false_verdicts, problems


def share(event: str, step: int, rank: int, indices: list[int], lineage: object = 1, **other: Any) -> dict[str, Any]:
    known = {"event": event, "step": step, "rank": rank, "groups": 2, "epoch": (step - 1) // 2, "indices": indices}
    return {**known, "lineage": lineage, **other}


STEPS = [
    share("committed", 1, 0, [3, 1]),
    share("committed", 1, 1, [0, 5]),
    share("committed", 2, 0, [2]),
    share("committed", 2, 1, [4]),
    share("committed", 3, 0, [1, 2]),
    share("committed", 3, 1, [0, 3]),
]


def test_each_sample_once_is_right():
    assert problems(STEPS, 6) == (10, [])


def test_a_sample_that_is_missing_or_twice_is_found():
    assert problems([*STEPS[:3], *STEPS[4:]], 6)[1][0] == "step 2: the share of rank 1 of 2 is not in the logs"
    twice = [*STEPS[:3], {**STEPS[3], "indices": [5]}, *STEPS[4:]]
    assert problems(twice, 6)[1] == ["epoch 0: 1 samples in no committed step, 1 in several: [5]"]
    assert "1 steps are not in the logs" in problems([*STEPS[:2], *STEPS[4:]], 6)[1]


def test_a_group_that_died_before_its_log_line_has_logged_what_it_drew():
    assert problems([*STEPS[:3], share("drawn", 2, 1, [4]), *STEPS[4:]], 6) == (10, [])


def test_of_a_step_that_committed_again_the_later_quorum_counts():
    lost = [share("committed", 2, 0, [0, 1, 2], 1), share("committed", 2, 1, [3, 4, 5], 1)]
    again = [{**one, "lineage": 2} for one in STEPS[2:4]]
    assert problems([*STEPS[:2], *lost, *again, *STEPS[4:]], 6) == (10, [])


def test_a_verdict_on_a_group_that_no_fault_let_hang_is_false():
    def hung(group: str, seconds: float, *, ended: bool = True) -> dict[str, Any]:
        detail = {"ended": ended, "seconds": seconds, "reason": f"{group} waits for {seconds} s"}
        return {"kind": "hung", "replica_id": f"{group}:7", "detail": detail}

    def fault(kind: str, target: str, seconds: float) -> dict[str, Any]:
        return {"kind": kind, "target": target, "seconds": seconds}

    faults = [fault("hang", "r1", 70.0), fault("slow", "r2", 70.0), fault("hang-loop", "r3", 6.0)]
    right = [hung("r1", 60.5), hung("r2", 60.5, ended=False), {"kind": "lost", "replica_id": "r2", "detail": {}}]
    assert false_verdicts(right, faults) == []
    wrong = [hung("r2", 60.5), hung("r3", 60.5), hung("r1", 90.0)]
    assert false_verdicts(wrong, faults) == [
        "false verdict: r2 waits for 60.5 s",
        "false verdict: r3 waits for 60.5 s",
        "false verdict: r1 waits for 90.0 s",
    ]
