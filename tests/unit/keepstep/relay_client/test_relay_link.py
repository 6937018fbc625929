"""The one rule about requests to relays that fail, over real connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.relay_client.relay_link import MAX_DAMAGES, DamagedBytes, RelayLink, is_absent
from keepstep.state.errors import TransferError, TransferTimeout


class Relay(ThreadingHTTPServer):
    """Answers with statuses, one after the other; the last one again and again. 0: close the connection."""

    daemon_threads = True

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses = list(statuses)
        self.asked = 0

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.of(f"http://127.0.0.1:{self.server_address[1]}", dict)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def do_GET(self) -> None:
        statuses = self.server.statuses
        status = statuses[min(self.server.asked, len(statuses) - 1)]
        self.server.asked += 1
        if not status:
            self.close_connection = True
            return
        body = f'{{"detail": "status {status}"}}'.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def relays(*answers: list[int]) -> Iterator[list[Relay]]:
    servers = [Relay(*statuses) for statuses in answers]
    threads = [threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}) for one in servers]
    for thread in threads:
        thread.start()
    try:
        yield servers
    finally:
        for one in servers:
            one.shutdown()
            one.server_close()
        for thread in threads:
            thread.join()


@contextmanager
def link_to(servers: list[Relay], **how: bool) -> Iterator[RelayLink]:
    link = RelayLink([one.endpoint for one in servers], Deadline(60, "no answer"), **how)
    try:
        yield link
    finally:
        link.close()


def get(connection: Connection) -> str:
    _, length = connection.ask("GET", "/")
    connection.read(length)
    return connection.address


@pytest.mark.parametrize("passes", [0, 503, 422, 500])
def test_a_request_is_repeated_after_a_broken_connection_and_an_answer_that_passes(passes: int) -> None:
    with relays([passes, passes, 200]) as (one,), link_to([one]) as link:
        assert link.ask(get) == one.endpoint.address
        assert one.asked == 3


def test_an_answer_that_does_not_pass_is_final_at_once() -> None:
    with relays([409]) as (one,), link_to([one]) as link:
        with pytest.raises(Refusal, match="status 409"):
            link.ask(get)
        assert one.asked == 1


def test_the_next_relay_is_asked_and_stays_the_one_that_is_asked() -> None:
    with relays([410], [200]) as (one, other), link_to([one, other]) as link:
        assert [link.ask(get) for _ in range(2)] == [other.endpoint.address] * 2
        assert (one.asked, other.asked) == (1, 2)


def test_the_error_names_the_reason_of_each_relay_and_is_one_that_may_have_it() -> None:
    with relays([403], [404]) as servers, link_to(servers) as link:
        with pytest.raises(Refusal, match=r"status 403.*; .*status 404") as caught:
            link.ask(get)
        assert caught.value.status == 403
        assert not is_absent(caught.value)


def test_a_relay_that_is_away_may_have_what_the_others_do_not_have() -> None:
    with relays([404], [0, 0, 200]) as (one, other), link_to([one, other]) as link:
        assert link.ask(get) == other.endpoint.address
        assert one.asked == 3


def test_damaged_bytes_are_fetched_again_a_few_times() -> None:
    def damaged(connection: Connection) -> None:
        raise DamagedBytes(f"from {get(connection)}")

    with relays([200], [200]) as (one, other), link_to([one, other]) as link:
        with pytest.raises(DamagedBytes, match=r"from .*; from ") as caught:
            link.ask(damaged)
        assert is_absent(caught.value)
        assert (one.asked, other.asked) == (MAX_DAMAGES, MAX_DAMAGES)


def test_once_raises_the_first_failure() -> None:
    with relays([503, 0]) as (one,), link_to([one], once=True) as link:
        with pytest.raises(Refusal, match="status 503"):
            link.ask(get)
        with pytest.raises(BrokenConnection):
            link.ask(get)
        assert one.asked == 2


def test_a_deadline_names_the_last_failure() -> None:
    with relays([503]) as (one,):
        link = RelayLink([one.endpoint], Deadline(0.5, "the state was not stored"))
        with pytest.raises(TransferTimeout, match=r"not stored within 0\.5 s; the relay failed \d+ times.*503"):
            link.ask(get)
        link.close()


def test_an_interrupt_ends_the_request_of_another_thread_and_refuses_new_ones() -> None:
    asked, go_on = threading.Event(), threading.Event()
    errors: list[str] = []

    def waits(connection: Connection) -> None:
        connection.ask("GET", "/")
        asked.set()
        assert go_on.wait(60)
        get(connection)

    def run(link: RelayLink) -> None:
        with pytest.raises(TransferError) as caught:
            link.ask(waits)
        errors.append(str(caught.value))

    with relays([200]) as (one,), link_to([one]) as link:
        thread = threading.Thread(target=run, args=(link,))
        thread.start()
        assert asked.wait(60)
        link.interrupt()
        go_on.set()
        thread.join(60)
        for end in (lambda: link.ask(get), lambda: link.pause(60)):
            with pytest.raises(TransferError) as caught:
                end()
            errors.append(str(caught.value))
    assert errors == ["the transfer was aborted"] * 3
