"""HTTPTransport over real sockets, with real processes where one has to die."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgpack
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.checkpoint_peer import MINUTE, state_of

from keepstep.checkpointing import HTTPTransport, ManifestError, TransferError, UnsupportedValue
from keepstep.checkpointing.manifest import CHUNK_BYTES
from keepstep.checkpointing.serialization import load_state, save_state

PEER = Path(__file__).with_name("checkpoint_peer.py")
MIB = 1 << 20


@pytest.fixture
def transports():
    """Makes transports on loopback and shuts them down."""
    made = []

    def make(num_chunks=0, timeout=MINUTE, token=None):
        made.append(HTTPTransport(timeout, num_chunks, hostname="127.0.0.1", token=token))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()


@contextlib.contextmanager
def peer(*arguments):
    command = [sys.executable, str(PEER), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(PEER.parents[2])}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def weights(state):
    return state["user"]["model"]["weights"]


def same(one, other):
    return (
        weights(one).equal(weights(other))
        and one["user"]["model"]["bias"].equal(other["user"]["model"]["bias"])
        and one["manager"] == other["manager"]
    )


def blank(mib):
    state = state_of(0, mib)
    weights(state).zero_()
    return state


def address(transport):
    host, port = transport.metadata().removeprefix("http://").split(":")
    return host, int(port)


class RawReader:
    """A reader that takes its bytes when the test says so."""

    def __init__(self, transport, step):
        self.connection = socket.create_connection(address(transport), timeout=60)
        fields, self.manifest = self.ask(f"GET /checkpoint/{step}?wait=30")
        self.lease = re.search(r"Keepstep-Lease: (\S+)", fields)[1]

    def head(self):
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            part = self.connection.recv(1)
            assert part, "closed"
            received += part
        return received.decode()

    def ask(self, line, *fields):
        self.connection.sendall("\r\n".join([f"{line} HTTP/1.1", *fields, "", ""]).encode())
        head = self.head()
        return head, self.take(int(re.search(r"Content-Length: (\d+)", head)[1]))

    def begin(self, length):
        self.connection.sendall(f"GET /lease/{self.lease} HTTP/1.1\r\nRange: bytes=0-{length - 1}\r\n\r\n".encode())
        assert " 206 " in self.head()

    def take(self, length):
        received = bytearray()
        while len(received) < length:
            part = self.connection.recv(min(length - len(received), 1 << 20))
            assert part, f"closed after {len(received)} of {length} bytes"
            received += part
        return bytes(received)

    def close(self):
        self.connection.close()


class Proxy:
    """Passes connections on to ``target``; ``change(connection number, bytes so far, data)`` edits what the server sends.

    ``change`` may return None: then the connection is broken off.
    """

    def __init__(self, target, change):
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = self.passed = 0
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self.connections += 1
                self._sockets += [client, server]
                for function, arguments in ((self._up, ()), (self._down, (self.connections,))):
                    self._threads.append(threading.Thread(target=function, args=(client, server, *arguments)))
                    self._threads[-1].start()

    def _up(self, client, server):
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _down(self, client, server, number):
        so_far = 0
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                changed = self._change(number, so_far, data)
                if changed is None:
                    break
                so_far += len(data)
                self.passed += len(data)
                client.sendall(changed)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()


def eventually(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


# ---- the plain way


@pytest.mark.parametrize("num_chunks", [0, 1, 4])
def test_a_state_arrives_bit_for_bit(transports, num_chunks):
    source, joiner = transports(), transports(num_chunks)
    source.send_checkpoint([1], 7, state_of(7, 100), MINUTE)
    seen = []
    received = joiner.recv_checkpoint(0, source.metadata(), 7, MINUTE, progress=lambda *counts: seen.append(counts))
    assert same(received, state_of(7, 100))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] >= 100 * MIB


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_a_state_arrives_in_the_memory_that_it_is_for(transports, num_chunks):
    source, joiner = transports(), transports(num_chunks)
    source.send_checkpoint([1], 7, state_of(7, 30), MINUTE)
    into = blank(30)
    place = weights(into).data_ptr()
    received = joiner.recv_checkpoint(0, source.metadata(), 7, MINUTE, into=into)
    assert weights(received) is weights(into)
    assert weights(into).data_ptr() == place
    assert same(into | {"manager": {"step": 7}}, state_of(7, 30))
    assert received["manager"] == {"step": 7}


@pytest.mark.parametrize(
    "state",
    [{}, None, {"only": "text"}, {"empty": torch.empty(0)}, {f"k{i}": torch.full((7,), i) for i in range(3000)}],
)
def test_small_and_odd_states_arrive(transports, state):
    source, joiner = transports(), transports(4)
    source.send_checkpoint([1], 1, state, MINUTE)
    received = joiner.recv_checkpoint(0, source.metadata(), 1, MINUTE)
    assert save_state(received)[0] == save_state(state)[0]


def test_a_state_arrives_between_two_processes(transports):
    with peer("source", 64) as process:
        url = process.stdout.readline().strip()
        assert same(transports().recv_checkpoint(0, url, 1, MINUTE), state_of(1, 64))
        process.stdin.write("stage 2\n")
        process.stdin.flush()
        assert same(transports(2).recv_checkpoint(0, url, 2, MINUTE), state_of(2, 64))


def test_row_20_what_is_served_is_the_staged_step_whatever_training_does_since(transports):
    source, joiner = transports(), transports()
    live = state_of(3, 40)
    source.send_checkpoint([1], 3, live, MINUTE)
    weights(live).zero_()
    live["user"]["model"]["bias"] += 1
    live["manager"]["step"] = 4
    assert same(joiner.recv_checkpoint(0, source.metadata(), 3, MINUTE), state_of(3, 40))


def test_several_readers_at_once_get_the_same_state(transports):
    source = transports()
    source.send_checkpoint([1, 2, 3], 5, state_of(5, 64), MINUTE)
    joiners = [transports(number) for number in (0, 2, 4, 0)]
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(lambda one: one.recv_checkpoint(0, source.metadata(), 5, MINUTE), joiners))
    assert all(same(one, state_of(5, 64)) for one in states)


def test_the_same_snapshot_serves_again_after_disallow_and_allow(transports):
    source, joiner = transports(timeout=timedelta(seconds=1)), transports()
    source.send_checkpoint([1], 2, state_of(2, 1), MINUTE)
    source.disallow_checkpoint()
    with pytest.raises(TransferError, match="step 2 was not staged within"):
        joiner.recv_checkpoint(0, source.metadata(), 2, MINUTE)
    with pytest.raises(ValueError, match="step 3 is not staged"):
        source.allow_checkpoint(3)
    source.allow_checkpoint(2)
    assert same(joiner.recv_checkpoint(0, source.metadata(), 2, MINUTE), state_of(2, 1))


def test_addresses_are_those_of_the_interface():
    with contextlib.closing(HTTPTransportAsCloser(HTTPTransport(MINUTE, 0))) as holder:
        transport = holder.transport
        assert transport.address() == transport.metadata() + "/checkpoint/"
        transport.send_checkpoint([1], 1, {"a": 1}, MINUTE)
        assert transport.recv_checkpoint(0, transport.metadata(), 1, MINUTE) == {"a": 1}


class HTTPTransportAsCloser:
    def __init__(self, transport):
        self.transport = transport

    def close(self):
        self.transport.shutdown()


# ---- waiting, refusing


def test_a_reader_that_comes_early_waits_for_the_step(transports):
    source, joiner = transports(), transports()
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(joiner.recv_checkpoint, 0, source.metadata(), 2, MINUTE)
        assert not early.done()
        source.send_checkpoint([1], 2, state_of(2, 1), MINUTE)
        assert same(early.result(60), state_of(2, 1))


def test_a_step_that_is_not_there_is_refused_with_the_reason(transports):
    source, joiner = transports(), transports()
    with pytest.raises(TransferError, match="step 9 was not staged within .* none has been"):
        joiner.recv_checkpoint(0, source.metadata(), 9, timedelta(seconds=1))
    source.send_checkpoint([1], 5, state_of(5, 1), MINUTE)
    with pytest.raises(TransferError, match="step 4 is gone: step 5 was staged since"):
        joiner.recv_checkpoint(0, source.metadata(), 4, MINUTE)
    with pytest.raises(TransferError, match="step 6 was not staged within .* the newest is 5"):
        joiner.recv_checkpoint(0, source.metadata(), 6, timedelta(seconds=1))


def test_row_14_a_reader_without_the_right_token_gets_nothing(transports):
    source = transports(token="right")
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    for token in (None, "wrong", "right2", ""):
        with pytest.raises(TransferError, match="token is missing or wrong"):
            transports(token=token).recv_checkpoint(0, source.metadata(), 1, MINUTE)
    assert same(transports(token="right").recv_checkpoint(0, source.metadata(), 1, MINUTE), state_of(1, 1))


def test_a_lease_needs_the_token_too(transports):
    source = transports(token="right")
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    for line in ("GET /lease/x", "DELETE /lease/x", "GET /checkpoint/1", "GET /anything"):
        with socket.create_connection(address(source), timeout=60) as connection:
            connection.sendall(f"{line} HTTP/1.1\r\n\r\n".encode())
            assert connection.recv(100).split()[1] in (b"401", b"400")


def test_a_state_that_cannot_be_stored_is_an_error_and_the_next_one_is_served(transports):
    source, joiner = transports(), transports()
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    with pytest.raises(UnsupportedValue, match=r"state\['f'\]"):
        source.send_checkpoint([1], 2, {"f": print}, MINUTE)
    source.send_checkpoint([1], 3, state_of(3, 1), MINUTE)
    assert same(joiner.recv_checkpoint(0, source.metadata(), 3, MINUTE), state_of(3, 1))


def test_wrong_arguments_are_errors_at_once():
    with pytest.raises(ValueError, match="timeout must be positive"):
        HTTPTransport(timedelta(0), 0)
    with pytest.raises(ValueError, match="number of streams"):
        HTTPTransport(MINUTE, -1)


def test_an_address_that_is_none_is_an_error_at_once(transports):
    with pytest.raises(ValueError, match="is not the address"):
        transports().recv_checkpoint(0, "<n/a>", 1, MINUTE)


# ---- slow and dead readers


def test_row_09_a_slow_reader_never_stalls_the_source_and_gets_its_own_step(transports):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 32), MINUTE)
    expected_manifest, expected = save_state(state_of(1, 32))
    reader = RawReader(source, 1)
    reader.begin(len(expected))
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
        readers.append(RawReader(source, step))
        readers[-1].begin(32 * MIB)
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
    reader = RawReader(source, 1)
    reader.begin(32 * MIB)
    with pytest.raises((AssertionError, ConnectionError)):
        time.sleep(1.5)
        reader.take(32 * MIB)
    source.send_checkpoint([1], 2, state_of(2, 32), MINUTE)
    fields, body = RawReaderless(source).ask(f"GET /lease/{reader.lease}", "Range: bytes=0-9")
    assert " 410 " in fields
    assert "lease has ended" in msgpack.unpackb(body)["reason"]
    reader.close()


class RawReaderless(RawReader):
    def __init__(self, transport):
        self.connection = socket.create_connection(address(transport), timeout=60)

    def ask(self, line, *fields):
        with self.connection:
            return super().ask(line, *fields)


def test_a_reader_killed_in_the_middle_disturbs_nobody(transports):
    source = transports(timeout=timedelta(seconds=5))
    source.send_checkpoint([1], 1, state_of(1, 128), MINUTE)
    with peer("reader", source.metadata(), 1) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    source.send_checkpoint([1], 2, state_of(2, 128), MINUTE)
    assert same(transports().recv_checkpoint(0, source.metadata(), 2, MINUTE), state_of(2, 128))
    eventually(lambda: len(source._staging._holds) == 1)


# ---- sources that die, freeze, lie; networks that break and flip


def test_a_source_killed_in_the_middle_is_an_error_that_says_the_target_is_torn(transports):
    with peer("source", 256) as process:
        url = process.stdout.readline().strip()
        into = blank(256)
        with pytest.raises(TransferError, match="source of step 1 is lost") as caught:
            transports().recv_checkpoint(0, url, 1, MINUTE, into=into, progress=lambda *_: process.kill())
        assert caught.value.torn
    with peer("source", 256) as process:
        url = process.stdout.readline().strip()
        assert weights(transports().recv_checkpoint(0, url, 1, MINUTE, into=into)) is weights(into)
        assert weights(into).equal(weights(state_of(1, 256)))


def test_a_frozen_source_is_a_timeout_at_the_deadline(transports):
    with peer("source", 256) as process:
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

        do_DELETE = do_GET

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
        (answer(b"", length=1 << 40), ManifestError, "manifest of 1099511627776 bytes"),
        (answer(b"x", length="-5"), TransferError, "does not speak this protocol"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", TransferError, "does not speak this protocol"),
        (b"x" * 20000, TransferError, "no end of header"),
        (answer(b"\xc1", "500 Oops"), TransferError, "refused .* 500 Oops"),
        (answer(save_state(1)[0]), ManifestError, "asked for step 1, got step 0"),
    ],
)
def test_row_14_a_lying_source_is_a_clear_error(transports, liar, sent, error, words):
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
    pickle.dumps(Evil()) + b"\r\n\r\n",
]


@pytest.mark.parametrize("sent", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused_and_the_next_reader_served(transports, sent):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    with socket.create_connection(address(source), timeout=60) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096).split()[1] in (b"400", b"404", b"410")
    assert same(transports().recv_checkpoint(0, source.metadata(), 1, MINUTE), state_of(1, 1))


@pytest.mark.parametrize(
    "asked", ["bytes=0-", "bytes=5-1", "bytes=0-99999999999", "0-1", "bytes=-5", "bytes=a-b", None]
)
def test_a_range_that_is_not_there_is_refused(transports, asked):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    reader = RawReader(source, 1)
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
        with socket.create_connection(address(source), timeout=60) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(start + data + b"\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

    send()
    assert same(transports().recv_checkpoint(0, source.metadata(), 1, MINUTE), state_of(1, 1))


def test_a_thousand_idle_connections_are_bounded_and_end(transports):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    threads = threading.active_count()
    idle = [socket.create_connection(address(source), timeout=60) for _ in range(300)]
    eventually(lambda: len(source._server._connections) == 128)
    assert threading.active_count() == threads
    for one in idle:
        one.close()
    eventually(lambda: not source._server._connections)
    assert same(transports().recv_checkpoint(0, source.metadata(), 1, MINUTE), state_of(1, 1))


# ---- ends and leaks


def test_shutdown_frees_a_receiver_that_waits(transports):
    source, joiner = transports(), transports()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(joiner.recv_checkpoint, 0, source.metadata(), 1, MINUTE)
        eventually(lambda: source._server._connections)
        joiner.shutdown()
        with pytest.raises(TransferError, match="shut down"):
            waiting.result(30)
    with pytest.raises(TransferError, match="shut down"):
        joiner.recv_checkpoint(0, source.metadata(), 1, MINUTE)


def test_shutdown_of_the_source_ends_its_readers_and_frees_the_port(transports):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 32), MINUTE)
    reader = RawReader(source, 1)
    reader.begin(32 * MIB)
    host = address(source)
    source.shutdown()
    source.shutdown()
    with pytest.raises((AssertionError, ConnectionError)):
        reader.take(32 * MIB)
    reader.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(host)
    with pytest.raises(RuntimeError, match="shut down"):
        source.send_checkpoint([1], 2, state_of(2, 1), MINUTE)


def test_fifty_transfers_leave_threads_descriptors_and_memory_as_they_were(transports):
    source, joiner = transports(), transports(2)
    live, into, me = state_of(1, 32), blank(32), psutil.Process()

    def transfer(step):
        live["manager"]["step"] = step
        source.send_checkpoint([1], step, live, MINUTE)
        assert joiner.recv_checkpoint(0, source.metadata(), step, MINUTE, into=into)["manager"]["step"] == step
        source.disallow_checkpoint()

    for step in range(10):
        transfer(step)
    gc.collect()
    threads, descriptors, memory = threading.active_count(), me.num_fds(), me.memory_info().rss
    for step in range(10, 60):
        transfer(step)
    gc.collect()
    eventually(lambda: me.num_fds() <= descriptors)
    assert threading.active_count() == threads
    assert me.memory_info().rss < memory + 40 * MIB


def test_memory_is_one_copy_at_the_source_and_none_at_the_joiner(transports):
    source, joiner, me = transports(), transports(), psutil.Process()
    live, into = state_of(1, 256), blank(256)
    before = me.memory_info().rss
    for step in range(1, 4):
        source.send_checkpoint([1], step, live, MINUTE)
        joiner.recv_checkpoint(0, source.metadata(), step, MINUTE, into=into)
    assert me.memory_info().rss < before + (256 + 64) * MIB
    assert weights(into).equal(weights(live))
    assert weights(live).nbytes > 8 * CHUNK_BYTES
