"""The reaction of a load to keys that only the checkpoint or only the requested state has."""

from __future__ import annotations

import pytest

from keepstep.sharded.validation import StrictHandling, compare_keys, parse_strict_flag

STORED, MINE, ALL = {"a", "b", "c"}, {"a", "x"}, {"a", "b", "x", "y"}
UNEXPECTED = "Unexpected keys, which the checkpoint does not have: "
MISSING = "Missing keys, which no rank requests: c"


@pytest.mark.parametrize(
    ("strict", "missing", "unexpected", "error", "warning"),
    [
        (StrictHandling.ASSUME_OK_UNEXPECTED, set(), set(), "", ""),
        (StrictHandling.LOG_UNEXPECTED, set(), {"x"}, "", f"{UNEXPECTED}x"),
        (StrictHandling.LOG_ALL, {"c"}, {"x"}, "", f"{UNEXPECTED}x; {MISSING}"),
        (StrictHandling.RAISE_UNEXPECTED, set(), {"x"}, f"{UNEXPECTED}x, y", ""),
        (StrictHandling.RAISE_ALL, {"c"}, {"x"}, f"{UNEXPECTED}x, y; {MISSING}", ""),
        (StrictHandling.RETURN_UNEXPECTED, set(), {"x"}, "", ""),
        (StrictHandling.RETURN_ALL, {"c"}, {"x"}, "", ""),
        (StrictHandling.IGNORE_ALL, set(), {"x"}, "", ""),
    ],
)
def test_each_flag_has_its_reaction(strict, missing, unexpected, error, warning) -> None:
    found = compare_keys(strict, STORED, MINE, ALL)
    assert (found.missing, found.unexpected, found.error, found.warning) == (missing, unexpected, error, warning)
    fits = compare_keys(strict, {"a"}, {"a"}, {"a"})
    assert (fits.missing, fits.unexpected, fits.error, fits.warning) == (set(), set(), "", "")


def test_a_flag_is_parsed_from_its_value() -> None:
    for one in StrictHandling:
        assert parse_strict_flag(one.value) is parse_strict_flag(one) is one
    for invalid in ("strict", None, True):
        with pytest.raises(
            ValueError, match=f"Invalid strict flag {invalid!r}: expected one of assume_ok_unexpected, "
        ):
            parse_strict_flag(invalid)
