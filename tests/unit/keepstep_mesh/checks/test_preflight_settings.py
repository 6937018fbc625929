"""The forms in which users write checks."""

from __future__ import annotations

import pytest

from keepstep_mesh.checks.preflight_settings import PreflightSettings


def test_no_check_means_none_and_any_check_includes_the_built_in_ones() -> None:
    assert PreflightSettings.parsed(()) is None
    assert PreflightSettings.parsed(("",)) is None
    assert PreflightSettings.parsed(("builtin",)) == PreflightSettings()


def test_each_form_is_read() -> None:
    checks = (
        "memory=2GiB",
        "disk=/data:1K",
        "disk=/a:b:2",
        "bandwidth=1M",
        "command=a=b c",
        "https://h:1/x",
        "http://h",
    )
    assert PreflightSettings.parsed(checks) == PreflightSettings(
        least_memory=2 << 30,
        least_disk=(("/data", 1024), ("/a:b", 2)),
        least_bandwidth=1 << 20,
        commands=("a=b c",),
        urls=("https://h:1/x", "http://h"),
    )


@pytest.mark.parametrize("check", ["gpu", "command=", "disk=/data", "disk=/data:much", "memory=", "http://", "ftp://h"])
def test_another_form_is_refused_with_its_text(check: str) -> None:
    with pytest.raises(ValueError, match=r"^check '"):
        PreflightSettings.parsed((check,))
