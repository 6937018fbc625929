"""HTTPTransport over real sockets and between real processes."""

from __future__ import annotations

import concurrent.futures
import gc
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch

from keepstep.checkpointing import HTTPTransport, TransferError, UnsupportedValue
from keepstep.state import staging
from keepstep.state.state_bytes import save_state
from keepstep.state.state_manifest import build_manifest
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_mesh.security.tokens import ClientToken
from tests.support.checkpoints.checkpoint_ends import MIB, RawReader, address, blank, eventually, peer, same, weights
from tests.support.checkpoints.checkpoint_peer import MINUTE, state_of

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


def test_a_state_travels_while_it_is_hashed(transports, monkeypatch):
    arrived = threading.Event()

    def hashed_late(*arguments):
        assert arrived.wait(60)
        return build_manifest(*arguments)

    def progress(done, total):
        if done == total:
            arrived.set()

    monkeypatch.setattr(staging, "build_manifest", hashed_late)
    source, joiner = transports(), transports(4)
    source.send_checkpoint([1], 7, state_of(7, 30), MINUTE)
    assert same(joiner.recv_checkpoint(0, source.metadata(), 7, MINUTE, progress=progress), state_of(7, 30))


def test_the_staged_step_is_served_while_training_goes_on(transports):
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


def test_the_default_address_is_one_that_serves():
    transport = HTTPTransport(MINUTE, 0)
    try:
        assert transport.address() == transport.metadata() + "/checkpoint/"
        transport.send_checkpoint([1], 1, {"a": 1}, MINUTE)
        assert transport.recv_checkpoint(0, transport.metadata(), 1, MINUTE) == {"a": 1}
    finally:
        transport.shutdown()


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
    with pytest.raises(TransferError, match=r"step 9 was not staged within .* no step is staged"):
        joiner.recv_checkpoint(0, source.metadata(), 9, timedelta(seconds=3))
    source.send_checkpoint([1], 5, state_of(5, 1), MINUTE)
    with pytest.raises(TransferError, match="step 4 is no longer available: the newest step is 5"):
        joiner.recv_checkpoint(0, source.metadata(), 4, MINUTE)
    with pytest.raises(TransferError, match=r"step 6 was not staged within .* the newest step is 5"):
        joiner.recv_checkpoint(0, source.metadata(), 6, timedelta(seconds=3))


def test_a_source_that_went_back_to_a_lower_step_serves_it(transports):
    """It staged a higher one before it healed from a job that was resumed from an older checkpoint."""
    source, joiner = transports(), transports()
    source.send_checkpoint([1], 500, state_of(5, 1), MINUTE)
    source.disallow_checkpoint()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(joiner.recv_checkpoint, 0, source.metadata(), 401, timedelta(seconds=20))
        with pytest.raises(concurrent.futures.TimeoutError):
            early.result(0.5)  # it waits, and is not refused
        source.send_checkpoint([1], 401, state_of(4, 1), MINUTE)
        assert same(early.result(60), state_of(4, 1))


def test_a_reader_without_the_right_token_gets_nothing(transports):
    source = transports(token="right")
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    for token in (None, "wrong", "right2", ""):
        with pytest.raises(TransferError, match="token is missing or wrong"):
            transports(token=token).recv_checkpoint(0, source.metadata(), 1, MINUTE)
    assert same(transports(token="right").recv_checkpoint(0, source.metadata(), 1, MINUTE), state_of(1, 1))


def test_during_a_rotation_readers_with_the_old_and_the_new_token_are_served(transports, tmp_path):
    file = tmp_path / "token"
    file.write_text("new\nold\n")
    source = transports(token=ClientToken({"KEEPSTEP_TOKEN_FILE": str(file)}))
    source.send_checkpoint([1], 1, state_of(1, 1), MINUTE)
    for token in ("old", "new"):
        assert same(transports(token=token).recv_checkpoint(0, source.metadata(), 1, MINUTE), state_of(1, 1))
    with pytest.raises(TransferError, match="token is missing or wrong"):
        transports(token="older").recv_checkpoint(0, source.metadata(), 1, MINUTE)


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
    with pytest.raises(ValueError, match="num_chunks must be at least 0"):
        HTTPTransport(MINUTE, -1)


def test_an_address_that_is_none_is_an_error_at_once(transports):
    with pytest.raises(ValueError, match="invalid address"):
        transports().recv_checkpoint(0, "<n/a>", 1, MINUTE)


# ---- ends and leaks


def test_shutdown_frees_a_receiver_that_waits(transports):
    source, joiner = transports(), transports()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(joiner.recv_checkpoint, 0, source.metadata(), 1, MINUTE)
        eventually(lambda: source.server._connections)
        joiner.shutdown()
        with pytest.raises(TransferError, match="shut down"):
            waiting.result(30)
    with pytest.raises(TransferError, match="shut down"):
        joiner.recv_checkpoint(0, source.metadata(), 1, MINUTE)


def test_shutdown_of_the_source_ends_its_readers_and_frees_the_port(transports):
    source = transports()
    source.send_checkpoint([1], 1, state_of(1, 32), MINUTE)
    reader = RawReader(source)
    reader.begin(1, 32 * MIB)
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
    live, into = state_of(1, 128), blank(128)
    before = me.memory_info().rss
    for step in range(1, 4):
        source.send_checkpoint([1], step, live, MINUTE)
        joiner.recv_checkpoint(0, source.metadata(), step, MINUTE, into=into)
    assert me.memory_info().rss < before + (128 + 48) * MIB
    assert weights(into).equal(weights(live))
    assert weights(live).nbytes > 8 * CHUNK_BYTES
