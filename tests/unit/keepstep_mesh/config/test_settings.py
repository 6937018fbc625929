"""Settings: which source wins, and what their texts mean."""

from __future__ import annotations

import pytest

from keepstep_mesh.config.settings import (
    Settings,
    bind_address,
    boolean,
    byte_size,
    duration,
    from_environment,
    split_addresses,
    whole,
)


def test_flags_beat_environment_beats_default() -> None:
    environ = {"KEEPSTEP_JOIN_TIMEOUT": "2s"}
    assert Settings({"join_timeout": 1.0}, environ).get("join_timeout", duration, 4.0) == 1.0
    assert Settings({"join_timeout": None}, environ).get("join_timeout", duration, 4.0) == 2.0
    assert Settings({}, {}).get("join_timeout", duration, 4.0) == 4.0


def test_names_of_torchft_serve_where_ours_are_not_set() -> None:
    assert from_environment("LIGHTHOUSE", {"TORCHFT_LIGHTHOUSE": "a:1"}) == ("TORCHFT_LIGHTHOUSE", "a:1")
    both = {"TORCHFT_LIGHTHOUSE": "a:1", "KEEPSTEP_LIGHTHOUSE": "b:1"}
    assert from_environment("LIGHTHOUSE", both) == ("KEEPSTEP_LIGHTHOUSE", "b:1")
    assert from_environment("LIGHTHOUSE", {"KEEPSTEP_LIGHTHOUSE": ""}) is None


def test_a_bad_value_names_where_it_came_from() -> None:
    with pytest.raises(ValueError, match=r"KEEPSTEP_MIN_REPLICAS='two': not a whole number"):
        Settings({}, {"KEEPSTEP_MIN_REPLICAS": "two"}).get("min_replicas", whole, 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("1.5", 1.5), (" 2 s ", 2.0), ("2m", 120.0), ("1h", 3600.0), (".5s", 0.5), ("0", 0)],
)
def test_a_duration_is_seconds_or_has_its_unit(text, seconds) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "1 year", "nan", "inf", "1e9", "s", "1.2.3"])
def test_an_invalid_duration_is_refused_with_an_example(text) -> None:
    with pytest.raises(ValueError, match="write 500ms"):
        duration(text)


@pytest.mark.parametrize("text", ["", "-1", "1 PB", "nan", "1e9", "9" * 400])
def test_an_invalid_size_is_refused_with_an_example(text) -> None:
    assert byte_size("1.5GiB") == 3 << 29
    with pytest.raises(ValueError, match="write 512MiB, 8GiB or a number of bytes"):
        byte_size(text)


def test_addresses_are_split_completed_and_checked() -> None:
    assert split_addresses("a:1, http://b:2/ ,https://[::1]:3,a:1") == ("http://a:1", "http://b:2", "https://[::1]:3")
    for bad in ("", " , "):
        with pytest.raises(ValueError, match="no address"):
            split_addresses(bad)
    for bad in ("a", "http://a", "a:x", "ftp://a:1", "http://a:1/path", "http://user@a:1", "a:1 b:2"):
        with pytest.raises(ValueError, match="is no address; write http://host:port"):
            split_addresses(bad)


def test_an_address_to_listen_on_is_completed_or_refused() -> None:
    assert bind_address("0.0.0.0:29510") == ("0.0.0.0", 29510)
    assert bind_address(":0") == ("127.0.0.1", 0)
    assert bind_address("*:1") == ("0.0.0.0", 1)
    assert bind_address("[::1]:1") == ("::1", 1)
    for bad in ("29510", "host", "host:", "host:99999", "host:-1"):
        with pytest.raises(ValueError, match="write host:port"):
            bind_address(bad)


def test_a_boolean_is_any_of_the_usual_words() -> None:
    assert [boolean(text) for text in ("1", "true", "YES", " on ")] == [True] * 4
    assert [boolean(text) for text in ("0", "false", "No", "off")] == [False] * 4
    with pytest.raises(ValueError, match="write true or false"):
        boolean("maybe")
