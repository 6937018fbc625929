"""Requests without an answer: each ends once, and its owner hears of it unless an answer came."""

from __future__ import annotations

import asyncio

import pytest

from keepstep.session import open_requests
from keepstep.session.open_requests import OpenRequests
from keepstep_mesh.errors import SessionClosed

DEADLINE = 20.0


class Requests:
    """Open requests, with the keys of those that were given up."""

    def __init__(self, *, connected: bool = False) -> None:
        self.given_up: list[object] = []
        self.open = OpenRequests(lambda: connected)

    def ask(self, key: object, seconds: float = DEADLINE) -> asyncio.Future[object]:
        deadline = asyncio.get_running_loop().time() + seconds
        return self.open.open(key, deadline, lambda: f"{key} is late", self.given_up.append)


async def test_each_request_gets_the_answer_with_its_key_and_a_late_one_is_dropped() -> None:
    requests = Requests()
    first, second = requests.ask(1), requests.ask((2, "vote"))
    requests.open.answer((2, "vote"), True)
    requests.open.answer(1, "plan")
    requests.open.answer(1, "again")
    assert [await first, await second] == ["plan", True]
    assert not requests.given_up
    assert not requests.open.any_open()


async def test_a_request_ends_at_its_deadline_and_the_others_do_not() -> None:
    requests = Requests()
    late, other = requests.ask("late", 0.01), requests.ask("other")
    with pytest.raises(TimeoutError, match="late is late"):
        await asyncio.wait_for(late, DEADLINE)
    assert requests.given_up == ["late"]
    assert not other.done()
    requests.open.answer("other", 1)
    assert await other == 1


async def test_a_connected_server_has_a_margin_to_answer_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests, "ANSWER_MARGIN", DEADLINE)
    requests, apart = Requests(connected=True), Requests(connected=False)
    asked, control = requests.ask(1, -1.0), apart.ask(1, -1.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(control, DEADLINE)  # its alarm was set after the other one
    requests.open.fail(1, KeyError("the reason"))
    with pytest.raises(KeyError, match="the reason"):
        await asked
    assert requests.given_up == []


async def test_a_cancelled_request_is_given_up_once_even_if_its_answer_comes_before_asyncio_says_so() -> None:
    requests = Requests()
    requests.ask(1).cancel()
    requests.open.answer(1, "too late")
    requests.ask(2).cancel()
    assert not requests.open.any_open(), "the next request may follow at once"
    await asyncio.sleep(0)
    assert requests.given_up == [1, 2]


async def test_the_end_of_the_session_ends_all_requests() -> None:
    requests = Requests()
    asked = [requests.ask(key) for key in (1, 2)]
    requests.open.fail_all(SessionClosed("the session has ended"))
    assert [one.done() for one in asked] == [True, True]
    for one in asked:
        with pytest.raises(SessionClosed, match="the session has ended"):
            await one
    assert requests.given_up == [1, 2]
