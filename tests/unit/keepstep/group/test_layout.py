"""Values that the groups of a job compare, and the first difference as a sentence; the parts of a layout."""

from __future__ import annotations

import pytest

from keepstep.group.agreement import ARITHMETIC, FixedLines, Layout, first_difference, group_settings, layout_digest
from keepstep.group.quorum_plan import WorldSizeMode
from keepstep_mesh.protocol.membership import MAX_SHOWN, differ, difference, settings_text

DYNAMIC, SPARES = WorldSizeMode.DYNAMIC, WorldSizeMode.FIXED_WITH_SPARES


def settings(**changes: object) -> str:
    usual = {"use_async_quorum": True, "world_size_mode": DYNAMIC, "min_replica_size": 1, "init_sync": True}
    return group_settings(**{**usual, "refuse_nonfinite": False, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"use_async_quorum": False},
        {"world_size_mode": SPARES},
        {"init_sync": False},
        {"refuse_nonfinite": True},
    ],
)
def test_every_setting_that_decides_the_arithmetic_tells_groups_apart(changes):
    (name, value), ours, theirs = *changes.items(), settings(), settings(**changes)
    assert differ(ours, theirs)
    assert f"setting {name}: " in difference(ours, "a", theirs, "b")
    assert str(getattr(value, "name", value)) in difference(ours, "a", theirs, "b")


def test_the_least_number_of_groups_counts_only_where_it_is_a_divisor():
    assert settings(min_replica_size=1) == settings(min_replica_size=2)
    two, three = (settings(world_size_mode=SPARES, min_replica_size=n) for n in (2, 3))
    assert difference(two, "a", three, "b") == (
        "setting world_size_mode: FIXED_WITH_SPARES of 2 in a, FIXED_WITH_SPARES of 3 in b"
    )


def test_the_number_of_spares_is_compared_under_the_name_of_its_variable():
    assert difference(settings(spares=1), "a", settings(), "b") == "setting KEEPSTEP_SPARES: 1 in a, unknown in b"


def test_the_version_of_the_arithmetic_is_compared():
    older = settings().replace(f"arithmetic {ARITHMETIC}", "arithmetic 0")
    assert difference(settings(), "here", older, "r1") == f"setting arithmetic: {ARITHMETIC} in here, 0 in r1"


def test_unknown_settings_fit_all_and_their_order_does_not_matter():
    assert not differ("", settings())
    assert not differ(settings(), "")
    assert not differ(settings_text({"a": 1, "b": 2}), settings_text({"b": 2, "a": 1}))


def test_a_peer_cannot_make_a_sentence_long():
    said = difference("a " + "x" * 9999, "here", "a b\n" + "y" * 9999, "there")
    assert len(said) < 4 * MAX_SHOWN


def test_parameters_that_are_not_known_yet_have_no_digest():
    assert layout_digest(settings(), []) == ""
    assert layout_digest(settings(), ["a (2,)"]) not in ("", layout_digest(settings(), ["a (3,)"]))


def test_the_digest_of_parameters_tells_settings_apart_too_for_a_lighthouse_that_compares_nothing_else():
    assert layout_digest(settings(), ["a (2,)"]) != layout_digest(settings(init_sync=False), ["a (2,)"])


def test_the_first_difference_names_a_setting_before_parameters():
    ours, theirs = settings(), settings(init_sync=False)
    said = first_difference(ours, ["a (2,)"], theirs, ["a (3,)"], "r1:7")
    assert said == "setting init_sync: True in here, False in r1:7"
    said = first_difference(ours, ["a (2,)"], ours, ["a (3,)"], "r1:7")
    assert said == "first difference, entry 0: here 'a (2,)', in r1:7 'a (3,)'"
    said = first_difference(ours, ["a (2,)"], "", ["a (2,)"], "r1:7")
    assert "r1:7 runs another version of keepstep" in said


def layout(*parts: list[str]) -> Layout:
    made = Layout()
    for lines in parts:
        made.add(FixedLines(lines))
    return made


def test_parts_that_were_added_in_another_order_make_an_equal_layout():
    assert layout(["b"], ["a", "c"]).lines() == layout(["a", "c"], ["b"]).lines() == ["a", "c", "b"]


@pytest.mark.parametrize(
    ("theirs", "missing"),
    [
        ([["a", "c"], ["b"]], []),
        ([["a", "c"], ["b"], ["e"]], ["e"]),
        ([["a", "c"], ["a", "d"], ["b"]], ["a", "d"]),
        ([["0"], ["a", "c"], ["b"], ["e"]], ["0", "e"]),
        ([["a", "c"], ["e"]], []),
        ([["a"], ["b"], ["e"]], []),
    ],
    ids=["equal", "at the end", "between", "around", "another part", "another line"],
)
def test_only_parts_that_a_group_does_not_have_are_missing(theirs, missing):
    mine, lines = layout(["b"], ["a", "c"]), layout(*theirs).lines()
    assert mine.missing(lines) == missing
    assert not mine.could_be(lines)
