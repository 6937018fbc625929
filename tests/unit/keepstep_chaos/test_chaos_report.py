"""Figures of the report of `keepstep chaos`: growth of processes, rows by kind, and broken promises."""

from __future__ import annotations

import json

import pytest

from keepstep_chaos.observing.observation import differing_weights
from keepstep_chaos.observing.resources import Sample, growth, joint
from keepstep_chaos.pace import Pace
from keepstep_chaos.recovery import Cost
from keepstep_chaos.verdict import COLUMNS, Outcome, fault_rows, markdown, summary
from keepstep_chaos.vocabulary import KINDS, Fault, Role, Target

R0 = Target(Role.GROUP, "r0")


def cost(kind: str, gap: float | None, back: float | None, **other: object) -> Cost:
    found = Cost(Fault(1, KINDS[kind], R0, 0.0), 0.0, 1.0, gap, back)
    for name, value in other.items():
        setattr(found, name, value)
    return found


def test_growth_is_the_slope_after_the_start():
    starting = [Sample(second, 1000 * second, 5 + second) for second in range(30)]
    steady = [Sample(second, 50_000 + 10 * second, 40) for second in range(30, 90)]
    found = growth([*starting, *steady])
    assert found is not None
    assert found.bytes_per_minute == pytest.approx(600)
    assert found.descriptors_per_minute == pytest.approx(0)
    assert growth(starting) is None


def test_the_growth_of_several_processes_is_that_of_all_their_samples_each_with_a_level_of_its_own():
    def process(level: int, slope: int, seconds: int) -> list[Sample]:
        return [Sample(second, level + slope * second, 9) for second in range(30 + seconds)]

    same = [growth(process(level, 10, seconds)) for level, seconds in ((1000, 20), (9000, 60))]
    found = joint([one for one in same if one is not None])
    assert (found.processes, found.seconds) == (2, 78)
    assert found.bytes_per_minute == pytest.approx(600)
    other = growth(process(0, 0, 60))
    assert other is not None
    assert 0 < joint([found, other]).bytes_per_minute < 600


def test_rows_are_by_kind_and_role():
    costs = [cost("kill", 0.1, 7.0, discarded=2, commit_gap_seconds=1.0)]
    costs += [cost("kill", 0.3, None, lost=["r1: lost"], commit_gap_seconds=2.0), cost("freeze", None, 1.0)]
    rows = fault_rows(costs)
    assert [row[0] for row in rows] == ["kill group", "freeze group"]
    assert rows[0][1:] == ("2", "-", "0.20 s", "0.30 s", "1.50 s", "2.00 s", "7.00 s", "7.00 s", "2", "1")
    assert rows[1][3] == "-"
    assert {len(row) for row in rows} == {len(COLUMNS)}


def test_each_broken_promise_is_named():
    assert Outcome(1, 60.0, [cost("kill", 0.1, 7.0)], 600, {}).broken() == []
    bad = Outcome(
        1, 60.0, [], 0, {}, wedged=True, unrecovered=[R0], violations=["one_state: x"], comparisons=2, differences=1
    )
    assert len(bad.broken()) == 4
    assert [line for line in summary(bad) if line.startswith("BROKEN: ")] == [f"BROKEN: {one}" for one in bad.broken()]
    assert json.loads(json.dumps(bad.json()))["wedged"] is True
    lost = [cost("kill", 0.1, 7.0, went_back=3)]
    assert Outcome(1, 60.0, lost, 600, {}).broken() == []
    (sentence,) = Outcome(1, 60.0, lost, 600, {}, keeps_steps=True).broken()
    assert sentence.startswith("3 committed steps were lost")
    unseen = Outcome(1, 60.0, [], 0, {}, unseen=[Target(Role.RELAY, "relay:29520")])
    assert summary(unseen)[-2:] == [
        "recovery of relay relay:29520 not seen: this machine cannot reach it",
        "no promise was broken",
    ]


def test_digests_of_one_step_and_lineage_must_be_equal(tmp_path):
    def write(group: str, *lines: tuple[int, int, str]) -> None:
        text = "".join(json.dumps(dict(zip(("step", "lineage", "digest"), one, strict=True))) + "\n" for one in lines)
        (tmp_path / f"{group}.digests").write_text(text + '{"step": 9, "li')

    write("0", (1, 1, "a"), (2, 1, "b"), (3, 1, "c"))
    write("1", (1, 1, "a"), (2, 1, "b"), (3, 2, "d"))
    assert differing_weights(tmp_path) == (2, [])
    write("1", (1, 1, "a"), (2, 1, "x"))
    compared, different = differing_weights(tmp_path)
    assert compared == 2
    assert different == ["step 2 of lineage 1: 1.digests and 0.digests hold different weights"]


def test_the_report_in_markdown_has_the_figures_of_the_run():
    costs = [cost("kill", 0.1, 7.0, detected_seconds=0.2, commit_gap_seconds=0.5, discarded=3, went_back=1)]
    done = Outcome(4, 60.0, costs, 600, {}, goodput=0.914, samples_per_step=32, groups=2, left_out={"cut": "a | b"})
    page = markdown(done, "digits")
    assert "goodput: 91.4%; committed steps lost: 1; samples lost: 160" in page
    assert "| kill group | 1 | 0.20 s | 0.10 s | 0.10 s | 0.50 s | 0.50 s | 7.00 s | 7.00 s | 3 | 0 |" in page
    assert "| cut | a \\| b |" in page
    assert done.json()["lost_samples"] == 160


def test_goodput_is_the_share_of_time_in_committed_steps_of_the_usual_length():
    pace = Pace()
    for group, steps in (("r0", range(100)), ("r1", [*range(25), *range(75, 100)])):  # r1 was down for half of the time
        for step in steps:
            pace.committed(group, step, step * 0.1)
    assert pace.step_seconds == pytest.approx(0.1)
    assert pace.goodput(2, 10.0) == pytest.approx(0.75)
    assert Pace().goodput(2, 10.0) is None
