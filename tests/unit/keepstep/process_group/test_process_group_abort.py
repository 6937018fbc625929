"""A Gloo group that is aborted, or whose peers do not answer: freed at once, wherever it waits, and usable after."""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from keepstep.futures import future_wait
from keepstep.process_group import ProcessGroupAbortedError, ProcessGroupError, ProcessGroupGloo
from keepstep.process_group.torch_backends import communicator, gloo
from keepstep.process_group.torch_backends.gloo_sockets import GlooRank, find, greet, shut_down
from keepstep.rendezvous.store_client import KeyValueServer, RendezvousStore, Table

LONG = timedelta(minutes=10)
"""Of the groups here: whatever ends before a test's own deadline was freed, and did not run out of time."""


def published(host: str, port: int, size: int) -> bytes:
    """Return the bytes that a Gloo rank with this address publishes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = struct.pack("=H", family) + struct.pack("!H", port)
    address += bytes(4) + socket.inet_pton(family, host) if family == socket.AF_INET6 else socket.inet_aton(host)
    address = address.ljust(128, b"\0") + struct.pack("=q", -1)
    numbers = b"".join(struct.pack("=q", number) for number in range(size))
    return struct.pack("=Q", 4) + b"host" + struct.pack("=Q", len(address)) + address + numbers


class Configuring:
    """Rank 0 of a group whose other ranks only published where they listen."""

    def __init__(self, host: str, others: tuple[str, int] | None, size: int = 2) -> None:
        self.server = KeyValueServer()
        table = Table(quorum_id=1)
        if others is not None:
            for rank in range(1, size):
                self.server.set(table, f"0/{rank}", published(*others, size))
        self.store = RendezvousStore("http://127.0.0.1:1", table, server=self.server, timeout=LONG)
        self.group = ProcessGroupGloo(LONG)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(host, size))
        self._thread.start()

    def _run(self, host: str, size: int) -> None:
        try:
            self.group.configure("", "r0", 0, size, 1, store=self.store, host=host)
        except Exception as error:  # noqa: BLE001
            self.error = error

    def is_stuck(self) -> bool:
        self._thread.join(0.3)  # no event shows that a wait goes on
        return self._thread.is_alive()

    def freed(self) -> Exception | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error

    def close(self) -> None:
        self.group.shutdown()
        self.server.close()
        self._thread.join(60)


def assert_abort_frees(configuring: Configuring) -> None:
    try:
        assert configuring.is_stuck()
        configuring.group.abort("r1 was lost")
        assert isinstance(configuring.freed(), ProcessGroupAbortedError)
    finally:
        configuring.close()


@pytest.fixture
def full_listener() -> Iterator[tuple[str, int]]:
    """An address where connecting neither succeeds nor fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        clients = [socket.socket() for _ in range(4)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("others", "size"),
    [(None, 3), (("127.0.0.2", 5), 2), (("127.0.0.2", 5), 4), (("::2", 5), 3)],
    ids=["no address published", "one should connect to us", "three should", "two should, over IPv6"],
)
def test_abort_frees_a_configure_that_waits_for_others(others, size) -> None:
    configuring = Configuring("::1" if others and ":" in others[0] else "127.0.0.1", others, size)
    try:
        assert configuring.is_stuck()
        configuring.group.abort("r1 was lost")
        error = configuring.freed()
        assert isinstance(error, ProcessGroupAbortedError)
        assert "r1 was lost" in str(error)
        assert "r1 was lost" in str(configuring.group.errored())
    finally:
        configuring.close()


def test_abort_frees_a_configure_although_its_first_attempts_get_no_memory(monkeypatch) -> None:
    attempts: list[None] = []

    def scarce(*args: object) -> list[socket.socket]:
        attempts.append(None)
        if len(attempts) < 4:
            raise MemoryError
        return greet(*args)

    monkeypatch.setattr(gloo, "greet", scarce)
    assert_abort_frees(Configuring("127.0.0.1", ("127.0.0.2", 5)))


def test_abort_frees_a_configure_that_connects_to_one_that_does_not_answer(full_listener) -> None:
    assert_abort_frees(Configuring("127.0.0.2", full_listener))


def test_a_peer_that_refuses_connections_fails_configure_at_once() -> None:
    configuring = Configuring("127.0.0.2", ("127.0.0.1", 1))
    try:
        error = configuring.freed()
        assert isinstance(error, ProcessGroupError)
        assert "refused" in str(error)
    finally:
        configuring.close()


def test_shutdown_from_another_thread_frees_a_configure() -> None:
    configuring = Configuring("127.0.0.1", None)
    assert configuring.is_stuck()
    configuring.close()
    assert isinstance(configuring.error, ProcessGroupAbortedError)


def test_abort_frees_a_configure_over_a_store_that_knows_no_abort() -> None:
    group = ProcessGroupGloo(LONG)
    errors = []

    def configure() -> None:
        try:
            group.configure("", "r0", 0, 2, 1, store=HashStore())
        except ProcessGroupAbortedError as error:
            errors.append(error)

    thread = threading.Thread(target=configure)
    thread.start()
    thread.join(0.3)  # by then it waits for the others, in C++, without an event
    group.abort("enough")
    thread.join(60)
    assert "enough" in str(errors[0])
    group.shutdown()


@pytest.mark.parametrize("operation", ["allreduce", "barrier", "recv", "allgather", "broadcast", "future", "joint"])
def test_abort_frees_every_wait_in_flight_and_the_peers_learn_of_it(cohort, operation) -> None:
    """Take six seconds: rank 1 waits for an idle rank 2, and sees that rank 0 left after ``STALL`` checks."""
    ranks = cohort(3, timeout=LONG)
    started = threading.Barrier(3)

    def run(group, rank):
        if rank == 2:
            started.wait(30)
            return None
        tensor = torch.ones(4)
        work = {
            "allreduce": lambda: group.allreduce([tensor]),
            "barrier": group.barrier,
            "recv": lambda: group.recv([tensor], 2, 0),
            "allgather": lambda: group.allgather([[torch.ones(4) for _ in range(3)]], [tensor]),
            "broadcast": lambda: group.broadcast(tensor, 2),
            "future": lambda: group.allreduce([tensor]),
            "joint": lambda: group.allgather_into_tensor_coalesced([torch.ones(12), torch.ones(12)], [tensor, tensor]),
        }[operation]()
        started.wait(30)
        waiting = work.get_future() if operation in {"future", "joint"} else work
        with pytest.raises(RuntimeError) as raised:
            waiting.wait()
        return raised.value

    waits = ranks.begin(run)
    waits[2].result(30)
    ranks.groups[0].abort("r2 was lost")
    errors = [wait.result(60) for wait in waits[:2]]
    if operation not in {"future", "joint"}:
        assert isinstance(errors[0], ProcessGroupAbortedError)
        assert "r2 was lost" in str(errors[0])
        assert isinstance(errors[1], ProcessGroupError)
    assert isinstance(ranks.groups[1].errored(), ProcessGroupError)


def test_a_group_is_unusable_after_an_abort_and_usable_after_the_next_configure(cohort) -> None:
    ranks = cohort(2)
    ranks.groups[0].abort("the lighthouse said so")
    with pytest.raises(ProcessGroupError, match="the lighthouse said so"):
        ranks.groups[0].allreduce([torch.ones(1)])
    for _ in range(3):
        ranks.configure()
        assert ranks.groups[0].errored() is None

        def run(group, rank):
            tensor = torch.ones(3)
            group.allreduce([tensor]).wait()
            return tensor.tolist()

        assert ranks.each(run) == [[2.0] * 3] * 2
        ranks.groups[1].abort()


def test_the_first_reason_of_an_abort_is_kept(cohort) -> None:
    ranks = cohort(2)
    ranks.groups[0].abort("first")
    ranks.groups[0].abort("second")
    assert str(ranks.groups[0].errored()) == "first"


def test_an_operation_that_takes_too_long_is_a_timeout_and_breaks_the_group(cohort) -> None:
    ranks = cohort(2, timeout=timedelta(seconds=0.3))
    with pytest.raises(TimeoutError, match=r"allreduce timed out after 0\.3 seconds") as late:
        ranks.groups[0].allreduce([torch.ones(2)]).wait()
    assert isinstance(late.value, RuntimeError), "as scripts for torchft and torch expect of a collective"
    error = ranks.groups[0].errored()
    assert isinstance(error, TimeoutError)
    assert "aborted" in str(error), "scripts for torchft look for this word"


def test_the_error_of_a_lost_peer_says_that_the_group_is_aborted(cohort) -> None:
    ranks = cohort(2, timeout=LONG)
    work = ranks.groups[0].allreduce([torch.ones(2)])
    ranks.groups[1].shutdown()
    with pytest.raises(RuntimeError, match="allreduce failed and aborted the process group"):
        work.wait()
    assert "aborted" in str(ranks.groups[0].errored())


def test_a_loss_that_gloo_does_not_notice_has_the_words_of_one_that_it_does(cohort, monkeypatch) -> None:
    monkeypatch.setattr(communicator, "STALL", 0)
    monkeypatch.setattr(gloo.GlooCommunicator, "has_lost_a_peer", lambda _: True)
    group = cohort(2, timeout=LONG).groups[0]
    with pytest.raises(RuntimeError, match="allreduce failed: Connection closed by peer"):
        future_wait(group.allreduce([torch.ones(2)]).get_future(), timedelta(seconds=60))
    assert "aborted" in str(group.errored()), "scripts for torchft look for this word"


def test_an_operation_that_ends_with_a_slice_of_its_wait_has_not_timed_out(cohort, monkeypatch) -> None:
    monkeypatch.setattr(communicator, "SLICE", timedelta(milliseconds=1))
    ranks = cohort(2, timeout=LONG)

    def run(group, rank):
        tensor = torch.ones(300_000)
        for _ in range(200):
            group.allreduce([tensor.fill_(1)]).wait()
        return tensor.max().item()

    assert ranks.each(run) == [2.0, 2.0]


def test_set_timeout_holds_for_operations_started_later(cohort) -> None:
    ranks = cohort(2, timeout=LONG)
    ranks.groups[0].set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TimeoutError):
        ranks.groups[0].allreduce([torch.ones(2)]).wait()


@pytest.mark.parametrize("operation", ["allreduce", "recv"])
def test_a_wait_with_a_timeout_ends_the_operation_so_that_no_late_result_lands(cohort, operation) -> None:
    ranks = cohort(2, timeout=LONG)
    tensor = torch.zeros(1_000_000)
    first, second = ranks.groups
    work = first.allreduce([tensor]) if operation == "allreduce" else first.recv([tensor], 1, 0)
    with pytest.raises(TimeoutError):
        work.wait(timedelta(seconds=0.2))
    seen = tensor.clone()
    late = torch.ones(1_000_000)
    with pytest.raises(ProcessGroupError):
        (second.allreduce([late]) if operation == "allreduce" else second.send([late], 0, 0)).wait()
    assert torch.equal(tensor, seen)


@pytest.mark.parametrize("operation", ["allreduce", "recv"])
@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
def test_nothing_lands_in_a_tensor_after_the_next_configure(cohort, operation, dropped) -> None:
    ranks = cohort(2, timeout=timedelta(seconds=2))  # what sleeps over half a message sleeps so long
    tensor = torch.zeros(2_000_000)
    first, second = ranks.groups
    work = first.allreduce([tensor]) if operation == "allreduce" else first.recv([tensor], 1, 0)
    sent = torch.ones(2_000_000)
    other = second.allreduce([sent]) if operation == "allreduce" else second.send([sent], 0, 0)
    if dropped:
        work = other = None
    ranks.configure()  # in the middle of it
    seen = tensor.clone()

    def run(group, rank):
        busy = torch.ones(100_000)
        group.allreduce([busy]).wait()
        return busy.max().item()

    assert ranks.each(run) == [2.0, 2.0]
    assert torch.equal(tensor, seen)
    del work, other


def test_a_work_of_an_earlier_configuration_cannot_break_the_present_one(cohort) -> None:
    ranks = cohort(2, timeout=LONG)
    old = ranks.groups[0].allreduce([torch.ones(2)])
    future = ranks.groups[0].allreduce([torch.ones(2)]).get_future()
    ranks.configure()
    with pytest.raises(ProcessGroupError):
        old.wait()
    with pytest.raises(RuntimeError):
        future.wait()
    assert ranks.groups[0].errored() is None
    assert ranks.each(lambda group, _: group.barrier().wait()) == [True, True]


def test_an_abort_touches_no_connection_of_another_group(cohort) -> None:
    doomed, bystander = cohort(2), cohort(2)
    left, right = socket.socketpair()
    with left, right, socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        doomed.groups[0].abort("only this one")
        assert bystander.each(lambda group, _: group.barrier().wait()) == [True, True]
        left.send(b"x")
        assert right.recv(1) == b"x"
        server, _ = listener.accept()
        with server:
            client.send(b"y")
            assert server.recv(1) == b"y"


LOCK_FILE = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_an_abort_lets_go_of_no_file_lock(cohort, tmp_path) -> None:
    path = tmp_path / "locked"

    def other_process_gets_it() -> bool:
        tried = [sys.executable, "-c", LOCK_FILE, path]
        return subprocess.run(tried, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode == 0

    assert other_process_gets_it()
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        cohort(2).groups[0].abort("whatever the reason")
        assert not other_process_gets_it()


def test_a_listening_socket_is_never_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = find(listener.getsockname(), set(), connecting=True)
        assert len(found.listening) == 1
        assert shut_down(found.own()) == 0
        with socket.create_connection(listener.getsockname(), timeout=30):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "2001:db8::5"])
def test_the_address_that_a_rank_publishes_is_read(host) -> None:
    assert GlooRank.parse(published(host, 29500, 3)) == GlooRank((host, 29500), (0, 1, 2))


@pytest.mark.parametrize("junk", [b"", b"x", bytes(40), b"\xff" * 200, published("127.0.0.1", 1, 2)[:50]])
def test_bytes_that_no_rank_publishes_are_a_value_error(junk) -> None:
    with pytest.raises(ValueError, match="unknown format of a Gloo address"):
        GlooRank.parse(junk)


def test_operations_before_configure_are_an_error() -> None:
    with pytest.raises(ProcessGroupError, match="not configured"):
        ProcessGroupGloo().allreduce([torch.ones(1)])


def test_a_rank_outside_of_the_group_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="invalid rank 2"):
        ProcessGroupGloo().configure("127.0.0.1:1/x", "r", 2, 2)


@pytest.mark.parametrize("address", ["", "host", "host/prefix", "host:port/prefix"])
def test_a_bad_store_address_is_a_value_error(address) -> None:
    with pytest.raises(ValueError, match="expected host:port/prefix"):
        ProcessGroupGloo().configure(address, "r", 0, 1)
