"""HTTPTransport with readers and sources that are slow, die, freeze or lie, and networks that break and flip."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpointing import ManifestError, TransferError
from keepstep.state.state_bytes import load_state, save_state
from keepstep.state.state_manifest import read_manifest
from keepstep.transfer.direct.sending.http_server import MAX_CONNECTIONS
from tests.support.checkpoints.checkpoint_ends import (
    MIB,
    Proxy,
    RawReader,
    address,
    blank,
    eventually,
    peer,
    same,
    weights,
)
from tests.support.checkpoints.checkpoint_peer import MINUTE, state_of

# ---- slow and dead readers


def test_a_slow_reader_never_stalls_the_source_and_gets_its_own_step(transports):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 32), MINUTE)
    expected_manifest, expected = save_state(state_of(1, 32))
    reader = RawReader(source)
    reader.begin(1, len(expected))
    taken = reader.take(100_000)
    live = state_of(2, 32)
    for step in range(2, 8):  # each overwrites a buffer; a source that waited would wait for ever
        weights(live).fill_(step)
        source.send_checkpoint([1], step, live, MINUTE)
        source.disallow_checkpoint()
    taken += reader.take(len(expected) - len(taken))
    reader.close()
    assert taken == bytes(expected)
    assert same(load_state(expected_manifest, taken), state_of(1, 32))


def test_when_a_third_buffer_would_be_needed_the_oldest_readers_are_cut_off(transports):
    source = transports()
    readers = []
    for step in (1, 2, 3):
        source.send_checkpoint([1], step, state_of(step, 32), MINUTE)
        readers.append(RawReader(source))
        readers[-1].begin(step, 32 * MIB)
    with pytest.raises((AssertionError, ConnectionError)):
        readers[0].take(32 * MIB)
    for step in (2, 3):
        expected = bytes(save_state(state_of(step, 32))[1])[: 32 * MIB]
        assert readers[step - 1].take(32 * MIB) == expected
    for reader in readers:
        reader.close()


def test_a_reader_that_takes_nothing_is_cut_off_and_its_memory_is_reused(transports):
    source = transports(timeout=timedelta(seconds=1))
    source.send_checkpoint([1], 1, state_of(1, 32), MINUTE)
    reader = RawReader(source)
    reader.begin(1, 32 * MIB)
    eventually(lambda: list(source._staging._holds.values()) == [1])  # its own
    with pytest.raises((AssertionError, ConnectionError)):
        reader.take(32 * MIB)
    source.send_checkpoint([1], 2, state_of(2, 32), MINUTE)
    late = RawReader(source)
    fields, body = late.ask(f"GET /lease/{reader.lease}", "Range: bytes=0-9")
    assert " 410 " in fields
    assert "lease has ended" in msgpack.unpackb(body)["reason"]
    reader.close()
    late.close()


def test_a_reader_killed_in_the_middle_disturbs_nobody(transports):
    source = transports(timeout=timedelta(seconds=2))
    source.send_checkpoint([1], 1, state_of(1, 64), MINUTE)
    with peer("reader", source.metadata(), 1) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    source.send_checkpoint([1], 2, state_of(2, 64), MINUTE)
    assert same(transports().recv_checkpoint(0, source.metadata(), 2, MINUTE), state_of(2, 64))
    eventually(lambda: len(source._staging._holds) == 1)


# ---- sources that die, freeze, lie; networks that break and flip


def test_a_source_killed_in_the_middle_is_an_error_that_says_the_target_is_torn(transports):
    with peer("source", 96) as process:
        url = process.stdout.readline().strip()
        into = blank(96)
        with pytest.raises(TransferError, match="source of step 1 is lost") as caught:
            transports().recv_checkpoint(0, url, 1, MINUTE, into=into, progress=lambda *_: process.kill())
        assert caught.value.torn
    with peer("source", 96) as process:
        url = process.stdout.readline().strip()
        assert weights(transports().recv_checkpoint(0, url, 1, MINUTE, into=into)) is weights(into)
        assert weights(into).equal(weights(state_of(1, 96)))


def test_a_frozen_source_is_a_timeout_at_the_deadline(transports):
    with peer("source", 96) as process:
        url = process.stdout.readline().strip()
        with pytest.raises(TimeoutError, match=r"step 1 from .* was not received within 2.0 s"):
            transports().recv_checkpoint(
                0, url, 1, timedelta(seconds=2), progress=lambda *_: process.send_signal(signal.SIGSTOP)
            )


def test_nobody_at_the_address_is_an_error(transports):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(TransferError, match="lost: cannot connect") as caught:
        transports().recv_checkpoint(0, url, 1, MINUTE, into=blank(1))
    assert not caught.value.torn


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_a_transfer_that_breaks_goes_on_where_it_was(transports, num_chunks):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 128), MINUTE)
    broken = set()

    def break_once_each(number, so_far, data):
        if so_far > 20 * MIB and number not in broken and len(broken) < 2:
            broken.add(number)
            return None
        return data

    with Proxy(address(source), break_once_each) as proxy:
        received = transports(num_chunks).recv_checkpoint(0, proxy.url, 1, MINUTE)
    assert same(received, state_of(1, 128))
    assert len(broken) == 2
    assert proxy.passed < (128 + 2 * 8 + 4) * MIB  # only the chunk that broke is sent again


def test_a_byte_flipped_on_the_wire_is_found_and_sent_again(transports):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 64), MINUTE)
    flipped = []

    def flip_once(_number, so_far, data):
        if so_far > 30 * MIB and not flipped:
            flipped.append(so_far)
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    with Proxy(address(source), flip_once) as proxy:
        received = transports().recv_checkpoint(0, proxy.url, 1, MINUTE, into=blank(64))
    assert flipped
    assert same(received, state_of(1, 64))


def test_bytes_that_are_always_flipped_are_an_error(transports):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 16), MINUTE)

    def flip(_number, so_far, data):
        return bytes([data[0] ^ 1]) + data[1:] if so_far > MIB else data

    with Proxy(address(source), flip) as proxy, pytest.raises(TransferError, match="arrived damaged 3 times") as caught:
        transports().recv_checkpoint(0, proxy.url, 1, MINUTE, into=blank(16))
    assert caught.value.torn


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("/tmp/keepstep-was-unpickled",))


@pytest.fixture
def liar():
    """A server that answers every request with ``liar.body``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.wfile.write(self.server.answer)
            self.close_connection = True

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def answer(body, status="200 OK", length=None):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (answer(pickle.dumps(Evil())), ManifestError, "no keepstep manifest|not msgpack"),
        (answer(b"", length=1 << 40), ManifestError, "manifest too long: 1099511627776 bytes"),
        (answer(b"x", length="-5"), TransferError, "does not speak this protocol"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", TransferError, "does not speak this protocol"),
        (b"x" * 20000, TransferError, "header of its answer does not end"),
        (answer(b"\xc1", "500 Oops"), TransferError, "was refused: .* 500 Oops"),
        (answer(save_state(1)[0]), ManifestError, "content must be a list"),
        (answer(read_manifest(save_state(1)[0]).content_bytes), ManifestError, "no keepstep manifest|not msgpack"),
    ],
)
def test_a_lying_source_is_a_clear_error(transports, liar, sent, error, words):
    liar.answer = sent
    with pytest.raises(error, match=words):
        transports().recv_checkpoint(0, liar.url, 1, MINUTE)
    assert not Path("/tmp/keepstep-was-unpickled").exists()


# ---- garbage at the server


GARBAGE = [
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /checkpoint/../../etc/passwd HTTP/1.1\r\n\r\n",
    b"GET /checkpoint/-1 HTTP/1.1\r\n\r\n",
    b"GET /checkpoint/" + b"9" * 60 + b" HTTP/1.1\r\n\r\n",
    b"GET /checkpoint/1?wait=1e9 HTTP/1.1\r\n\r\n",
    b"POST /checkpoint/1 HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    b"GET /checkpoint/1 HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET /checkpoint/1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"DELETE /checkpoint/1 HTTP/1.1\r\n\r\n",
    b"GET /lease/nobody HTTP/1.1\r\nRange: bytes=0-1\r\n\r\n",
    b"A" * 100_000,
    b"GET /checkpoint/1 HTTP/1.1\r\nX: " + b"A" * 100_000,
    pickle.dumps(Evil()) + b"\r\n\r\n",
]


@pytest.mark.parametrize("sent", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused_and_the_next_reader_served(transports, sent):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    with socket.create_connection(address(source), timeout=60) as connection, contextlib.suppress(OSError):
        connection.sendall(sent)  # may be reset: the server does not read garbage to its end
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096).split()[1] in (b"400", b"404", b"410")
    assert same(transports().recv_checkpoint(0, source.metadata(), 1, MINUTE), state_of(1, 1))


@pytest.mark.parametrize(
    "asked", ["bytes=0-", "bytes=5-1", "bytes=0-99999999999", "0-1", "bytes=-5", "bytes=a-b", None]
)
def test_a_range_that_is_not_there_is_refused(transports, asked):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    reader = RawReader(source)
    reader.open(1)
    fields, body = reader.ask(f"GET /lease/{reader.lease}", *([f"Range: {asked}"] if asked else []))
    reader.close()
    assert " 416 " in fields
    assert "within the" in msgpack.unpackb(body)["reason"]


def test_random_bytes_never_stop_the_server(transports):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)

    @settings(max_examples=100, deadline=None)
    @given(st.binary(max_size=300), st.sampled_from([b"", b"GET /checkpoint/1", b"GET /lease/"]))
    def send(data, start):
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(address(source), timeout=60) as connection,
        ):
            connection.sendall(start + data + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass

    send()
    assert same(transports().recv_checkpoint(0, source.metadata(), 1, MINUTE), state_of(1, 1))


def test_idle_connections_are_bounded(transports, caplog):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    threads = threading.active_count()
    idle = [socket.create_connection(address(source), timeout=60) for _ in range(MAX_CONNECTIONS + 50)]
    eventually(lambda: len(source.server._connections) == MAX_CONNECTIONS)
    assert threading.active_count() == threads
    for one in idle[MAX_CONNECTIONS:]:
        assert not one.recv(1)
    logged = [record for record in caplog.records if "too many connections" in record.getMessage()]
    assert len(logged) == 1
    for one in idle:
        one.close()
    eventually(lambda: not source.server._connections)
    assert same(transports().recv_checkpoint(0, source.metadata(), 1, MINUTE), state_of(1, 1))
