"""A Gloo group that ends in order, while slower members still connect or still read."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from keepstep.process_group import ProcessGroup, ProcessGroupAbortedError, ProcessGroupBabyGloo, ProcessGroupError
from keepstep.process_group.torch_backends import disposal, gloo, gloo_sockets
from keepstep.process_group.torch_backends.backend import ProcessGroupShutDownError
from keepstep.process_group.torch_backends.gloo_sockets import are_open, find, finish_sending, shut_down
from keepstep.rendezvous.interruptible_store import UNKNOWN_VERSION
from keepstep.rendezvous.key_value_server import VERSION
from keepstep.rendezvous.store_client import RendezvousStore, Table
from keepstep_mesh.net.process_sockets import is_tcp, local_endpoint, peer_endpoint, process_sockets
from tests.support.jobs.cohort import Cohort

LONG = timedelta(minutes=10)
"""Of the groups here: whatever ends before a test's own deadline was freed, and did not run out of time."""
WITHOUT_BARRIER = gloo.FIRST_BARRIER - 1


def store(ranks: Cohort, version: int = VERSION, kind: type[RendezvousStore] = RendezvousStore) -> RendezvousStore:
    return kind("http://127.0.0.1:1", Table(quorum_id=1), server=ranks.server, version=version)


def sums(ranks: Cohort) -> list[float]:
    """Return what each rank gets from an all-reduce of ones."""

    def run(group: ProcessGroup, _: int) -> float:
        tensor = torch.ones(3)
        group.allreduce([tensor]).wait()
        return tensor[0].item()

    return ranks.each(run)


@pytest.mark.parametrize("ends", ["abort", "shutdown"])
def test_the_end_of_one_rank_touches_no_connection_between_the_others(cohort, ends) -> None:
    ranks = cohort(3)
    getattr(ranks.groups[2], ends)()
    tensor = torch.zeros(3)
    sent = ranks.groups[0].send([torch.ones(3)], 1, 0)
    assert ranks.groups[1].recv([tensor], 0, 0).wait()
    assert sent.wait()
    assert tensor.tolist() == [1.0] * 3


class LateStore(RendezvousStore):
    """A store whose values arrive once ``released`` is set."""

    released: threading.Event

    def get(self, key: str) -> bytes:
        assert self.released.wait(30)
        return super().get(key)


@pytest.mark.parametrize("version", [VERSION, UNKNOWN_VERSION])
def test_a_rank_that_leaves_at_once_does_not_end_the_configure_of_a_slower_one(cohort, version) -> None:
    ranks = cohort(2, configured=False)
    slow, fast = ranks.groups
    late = store(ranks, version, LateStore)
    late.released = threading.Event()

    def come_and_go() -> None:
        # Gloo connects to the lower address
        fast.configure("", "r1", 1, 2, 1, store=store(ranks, version), host="127.0.0.2")
        fast.shutdown()

    thread = threading.Thread(target=come_and_go)
    timer = threading.Timer(0.3, late.released.set)  # no event shows that the fast one waits
    thread.start()
    timer.start()
    try:
        slow.configure("", "r0", 0, 2, 1, store=late, host="127.0.0.1")
    finally:
        thread.join(60)
        timer.join(60)
    assert slow.errored() is None


def open_at(address: tuple[str, int]) -> int:
    """Return the number of sockets with this local address, or connected to it, without listeners."""
    found = 0
    for _, one in process_sockets():
        if is_tcp(one) and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found += address in (local_endpoint(one), peer_endpoint(one))
    return found


def in_a_child(count: Callable[[], int]) -> int:
    """Return ``count()`` of a forked child."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(count())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_peer_reads_all_that_was_sent_before_a_shutdown_although_it_sends_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as peer:
        peer.connect(listener.getsockname())
        left, _ = listener.accept()
        with left:
            left.setblocking(False)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += left.send(bytes(100_000))
            ended = finish_sending(find(listener.getsockname(), set()).own())
        assert in_a_child(lambda: open_at(listener.getsockname())) == 1  # the end of the peer, which is the test's own
        disposal.dispose([None], ended)
        peer.settimeout(60)
        peer.sendall(b"the next collective")
        received = 0
        while part := peer.recv(100_000):
            received += len(part)
        assert received == sent
    for thread in tuple(disposal._disposals):
        thread.join(60)


def test_a_descriptor_that_another_socket_got_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as peer:
        peer.connect(listener.getsockname())
        left, _ = listener.accept()
        connections = find(listener.getsockname(), set()).own()
        assert are_open(connections)
        other, its_end = socket.socketpair()
        with other, its_end:
            os.dup2(other.fileno(), left.fileno())
            with left:
                assert not are_open(connections)
                assert shut_down(connections) == 0
                assert finish_sending(connections) == []
                its_end.send(b"x")
                assert other.recv(1) == b"x"
        assert not are_open(connections)
        assert shut_down(connections) == 0


class Meeting:
    """Rank 0 of two, which waits in its barrier: rank 1 is connected, and of a build that knows none."""

    def __init__(self, ranks: Cohort) -> None:
        self.group, self.other = ranks.groups
        self._waits = threading.Event()
        self.error: Exception | None = None
        started = gloo.GlooCommunicator.started

        def note(communicator: gloo.GlooCommunicator, work: Any) -> None:
            started(communicator, work)
            self._waits.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gloo.GlooCommunicator, "started", note)
            threads = [
                threading.Thread(target=self._run, args=(self.group, 0, store(ranks))),
                threading.Thread(target=self._run, args=(self.other, 1, store(ranks, WITHOUT_BARRIER))),
            ]
            for thread in threads:
                thread.start()
            threads[1].join(60)
            assert self._waits.wait(60)
        self._thread = threads[0]

    def _run(self, group: ProcessGroup, rank: int, at: RendezvousStore) -> None:
        try:
            group.configure("", f"r{rank}", rank, 2, 1, store=at)
        except Exception as error:  # noqa: BLE001
            self.error = error

    def freed(self) -> Exception | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error


def test_a_peer_that_ends_while_others_meet_it_fails_their_configure_at_once(cohort) -> None:
    meeting = Meeting(cohort(2, configured=False, timeout=LONG))
    meeting.other.abort("its own reason")
    error = meeting.freed()
    assert isinstance(error, ProcessGroupError)
    assert re.search(r"configure of rank 0 of 2 failed.*(closed by peer|reset by peer)", str(error))
    with pytest.raises(ProcessGroupError, match="must be configured again"):
        meeting.group.barrier()


@pytest.mark.parametrize("ends", ["abort", "shutdown"])
def test_the_end_of_a_group_frees_its_wait_for_the_others(cohort, ends) -> None:
    meeting = Meeting(cohort(2, configured=False, timeout=LONG))
    getattr(meeting.group, ends)()
    assert isinstance(meeting.freed(), ProcessGroupAbortedError)


def test_the_wait_for_the_others_has_the_deadline_of_configure(cohort) -> None:
    ranks = cohort(2, configured=False, timeout=LONG)
    ranks.groups[0].set_timeout(timedelta(seconds=1))
    error = Meeting(ranks).freed()
    assert isinstance(error, TimeoutError)
    assert "the connection of all members timed out after 1" in str(error)


def test_a_build_without_the_barrier_meets_one_that_does_not_know_its_version(cohort) -> None:
    ranks = cohort(2, configured=False)
    stores = [store(ranks, UNKNOWN_VERSION), store(ranks, WITHOUT_BARRIER)]
    ranks.each(lambda group, rank: group.configure("", f"r{rank}", rank, 2, 1, store=stores[rank]))
    assert sums(ranks) == [2.0, 2.0]


def test_a_group_in_a_child_process_meets_one_in_this_process_over_a_store_of_torch(cohort) -> None:
    ranks = cohort(2, configured=False)
    ranks.groups[1] = ProcessGroupBabyGloo(timedelta(seconds=30))
    at = HashStore()
    ranks.each(lambda group, rank: group.configure("", f"r{rank}", rank, 2, 1, store=at, host="127.0.0.1"))
    assert at.check(["meets/0", "meets/1"])
    assert sums(ranks) == [2.0, 2.0]


@pytest.mark.parametrize("ends", ["abort", "shutdown"])
def test_the_end_of_a_rank_reaches_its_peers_where_the_kernel_does_not_tell_what_an_epoll_has(
    cohort, monkeypatch, ends
) -> None:
    monkeypatch.setattr(gloo_sockets, "_POLLED", re.compile("nothing"))
    ranks = cohort(2, timeout=LONG)
    work = ranks.groups[0].allreduce([torch.ones(2)])
    getattr(ranks.groups[1], ends)()
    with pytest.raises(ProcessGroupError, match="by peer"):
        work.wait()


def test_an_operation_that_begins_beside_a_shutdown_ends(cohort) -> None:
    """Else it would write to its tensor for as long as its peer, which is frozen here, keeps the connection open."""
    ranks = cohort(2, configured=False, timeout=LONG)
    child = ranks.groups[1] = ProcessGroupBabyGloo(LONG)
    ranks.configure(host="127.0.0.1")
    communicator = ranks.groups[0]._communicator
    os.kill(child.child_pid, signal.SIGSTOP)
    start, ended = communicator.start, []

    def start_late(operation: str, args: tuple[object, ...]) -> object:
        raw = start(operation, args)
        communicator.fail(ProcessGroupShutDownError("the process group was shut down"))  # it sees no operation yet
        ended.extend(found.dup() for found in communicator._ended)
        return raw

    communicator.start = start_late
    with pytest.raises(ProcessGroupAbortedError):
        ranks.groups[0].recv([torch.ones(2)], 1, 0).wait()
    (connection,) = ended
    with connection:
        assert connection.recv(1) == b"", "it can still receive"
