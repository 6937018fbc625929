"""The lighthouse that a worker tries next."""

from __future__ import annotations

import pytest

from keepstep_mesh.net.lighthouse_addresses import (
    PASS_BACKOFF,
    SESSION_CONNECT_SECONDS,
    SETTLED_SECONDS,
    Addresses,
)


def delays(addresses: Addresses, count: int, chance: float = 1.0) -> list[tuple[float, str]]:
    return [addresses.next(chance) for _ in range(count)]


def test_every_address_is_tried_once_without_waiting() -> None:
    assert delays(Addresses(["a", "b", "a"]), 2) == [(0.0, "a"), (0.0, "b")]


def test_each_further_pass_waits_longer_up_to_a_limit() -> None:
    addresses = Addresses(["a", "b"])
    waits = [delay for delay, _ in delays(addresses, 40) if delay]
    assert waits[:4] == [0.02, 0.04, 0.08, 0.16]
    assert waits[-1] == PASS_BACKOFF.most
    assert waits == sorted(waits)


def test_chance_spreads_the_waits() -> None:
    assert [delays(Addresses(["a"]), 2, chance)[1][0] for chance in (0.0, 0.5)] == [0.01, 0.015]


def test_a_connection_that_lasted_is_tried_again_at_once_and_first() -> None:
    addresses = Addresses(["a", "b"])
    delays(addresses, 9)
    addresses.lost("b", SETTLED_SECONDS)
    assert delays(addresses, 2) == [(0.0, "b"), (0.0, "a")]
    assert addresses.next(1.0) == (0.02, "a")


def test_a_lighthouse_that_fell_silent_is_tried_last() -> None:
    addresses = Addresses(["a", "b", "c"])
    addresses.next(1.0)
    addresses.lost("a", 60.0, silent=True)
    assert delays(addresses, 3) == [(0.0, "b"), (0.0, "c"), (0.0, "a")]


def test_a_lighthouse_that_fell_silent_is_waited_for_briefly_and_longer_each_time() -> None:
    addresses = Addresses(["a", "b"])
    assert addresses.connect_seconds("a") == SESSION_CONNECT_SECONDS
    addresses.lost("a", 60.0, silent=True)
    waits = []
    for _ in range(5):
        waits.append(addresses.connect_seconds("a"))
        addresses.timed_out("a")
    assert waits == [0.5, 1.0, 2.0, 4.0, SESSION_CONNECT_SECONDS]
    assert addresses.connect_seconds("b") == SESSION_CONNECT_SECONDS
    addresses.lost("a", 0.1)
    assert addresses.connect_seconds("a") == SESSION_CONNECT_SECONDS, "it answered in between"


def test_a_lighthouse_that_did_not_answer_is_last_in_every_pass() -> None:
    addresses = Addresses(["a", "b", "c"])
    addresses.next(1.0)
    addresses.timed_out("a")
    assert [address for _, address in delays(addresses, 5)] == ["b", "c", "b", "c", "a"]


def test_a_silent_lighthouse_is_asked_again_although_another_names_it_the_leader() -> None:
    addresses = Addresses(["a", "b"])
    addresses.lost("a", 60.0, silent=True)
    tried = []
    for _ in range(4):
        _, address = addresses.next(1.0)
        tried.append(address)
        if address == "b":
            addresses.follow("a")
    assert tried == ["b", "a", "b", "a"]


def test_a_silent_leader_that_is_known_by_another_address_is_tried_last_too() -> None:
    addresses = Addresses(["a", "b"])
    addresses.follow("c")
    assert addresses.next(1.0) == (0.0, "c")
    addresses.lost("c", 60.0, silent=True)
    tried = []
    for _ in range(6):
        _, address = addresses.next(1.0)
        tried.append(address)
        if address == "a":
            addresses.follow("c")
    assert tried == ["a", "b", "c", "a", "b", "c"]


def test_connections_that_break_at_once_are_not_hammered() -> None:
    addresses = Addresses(["a"])
    waits = []
    for _ in range(12):
        delay, _ = addresses.next(1.0)
        waits.append(delay)
        addresses.lost("a", 0.01)
    assert waits[0] == 0.0
    assert waits[-1] == PASS_BACKOFF.most


def test_the_named_leader_is_next_but_only_once_in_a_pass() -> None:
    addresses = Addresses(["a", "b"])
    assert addresses.next(1.0) == (0.0, "a")
    addresses.follow("c")
    assert addresses.next(1.0) == (0.0, "c")
    addresses.follow("c")
    assert addresses.next(1.0) == (0.0, "b")
    assert addresses.next(1.0) == (0.02, "a")
    addresses.follow("c")
    assert addresses.next(1.0) == (0.0, "c")


def test_a_leader_named_by_one_that_we_were_connected_to_comes_before_it() -> None:
    addresses = Addresses(["a", "b"])
    addresses.next(1.0)
    addresses.follow("c")
    addresses.lost("a", 60.0)
    assert delays(addresses, 2) == [(0.0, "c"), (0.0, "a")]


def test_two_that_name_each_other_do_not_keep_us_running_in_circles() -> None:
    addresses = Addresses(["a", "b"])
    waited = 0.0
    for _ in range(30):
        delay, address = addresses.next(1.0)
        waited += delay
        addresses.follow("b" if address == "a" else "a")
    assert waited > 1.0


def test_no_address_is_an_error_that_says_where_to_set_one() -> None:
    with pytest.raises(ValueError, match="KEEPSTEP_LIGHTHOUSE"):
        Addresses([])
