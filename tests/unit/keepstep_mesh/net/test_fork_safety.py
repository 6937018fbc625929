"""Which sockets a forked child keeps, and what it may do with the rest."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest

from keepstep.runtime.exits import TerminationFlag
from keepstep_mesh.errors import ForkError
from keepstep_mesh.net.fork_safety import OfParent, claim_opened, listening_socket, open_socket, sockets_at
from tests.support.processes.children import DEADLINE, in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


def is_open(one: socket.socket) -> bool:
    """Whether its descriptor is that of a socket still."""
    try:
        one.getsockname()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_child_keeps_neither_a_listening_socket_of_ours_nor_what_it_accepted(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        listening_socket(host, 0) as listener,
        open_socket(family, socket.SOCK_STREAM, 0) as client,
    ):
        client.connect(("::1" if ":" in host else "127.0.0.1", listener.getsockname()[1]))
        with listener.accept()[0] as accepted:
            assert in_child(lambda: [is_open(one) for one in (listener, client, accepted)]) == [False] * 3
            client.sendall(b"on")
            assert accepted.recv(2) == b"on", "a child that ends leaves the parent's connection as it is"


def test_a_child_keeps_a_connection_of_the_script_to_a_listener_of_ours_and_one_at_the_same_port_elsewhere():
    with listening_socket("127.0.0.1", 0) as ours:
        port = ours.getsockname()[1]
        with (
            socket.create_server(("127.0.0.2", port)) as other,
            socket.create_connection(("127.0.0.1", port)) as to_ours,
            socket.create_connection(("127.0.0.2", port)) as to_other,
            other.accept()[0] as accepted,
        ):
            assert in_child(lambda: [is_open(one) for one in (other, to_ours, to_other, accepted)]) == [True] * 4


def test_a_socket_of_the_script_that_got_the_number_of_a_closed_one_of_ours_is_kept():
    opened = open_socket(socket.AF_INET, socket.SOCK_STREAM, 0)
    number = opened.fileno()
    opened.close()
    with socket.socket() as scripts:
        assert scripts.fileno() == number
        assert in_child(partial(is_open, scripts))


def test_an_owner_in_a_child_closes_no_descriptor_of_the_child():
    with open_socket(socket.AF_INET, socket.SOCK_STREAM, 0) as opened:

        def use() -> str:
            reading, writing = os.pipe()
            opened.close()
            os.write(writing, b"on")
            return os.read(reading, 2).decode()

        assert in_child(use) == "on"


RACE = """
import os, socket, threading
from keepstep_mesh.net.fork_safety import listening_socket, open_socket
from keepstep_mesh.net.process_sockets import process_sockets

def kept():
    pid = os.fork()
    if pid == 0:
        os._exit(len(list(process_sockets())))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def open_and_close():
    while not over.is_set():
        open_socket(socket.AF_INET, socket.SOCK_STREAM, 0).close()
        listening_socket("127.0.0.1", 0).close()
        opened.release()

over, opened = threading.Event(), threading.Semaphore(0)
opening = threading.Thread(target=open_and_close)
opening.start()
try:
    opened.acquire()
    print(sum(kept() for _ in range(100)))
finally:
    over.set()
    opening.join()
"""


def test_no_fork_comes_between_the_opening_of_a_socket_and_its_claim():
    """A process of its own, whose forks are fast, opens sockets in another thread all the time."""
    command = [sys.executable, "-W", "ignore", "-c", RACE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_sockets_of_a_library_are_closed_in_a_child_and_no_program_inherits_them():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as scripts:
            with claim_opened(partial(sockets_at, port)):
                librarys = socket.create_connection(("127.0.0.1", port))
                librarys.set_inheritable(True)
                assert in_child(lambda: [is_open(scripts), is_open(librarys)]) == [True, False]
            with librarys:
                assert in_child(lambda: [is_open(server), is_open(scripts), is_open(librarys)]) == [True, True, False]
                assert not librarys.get_inheritable()


def test_a_socket_that_gets_the_number_of_one_that_was_just_found_stays_claimed():
    libraries = socket.create_server(("127.0.0.1", 0))
    number, opened = libraries.fileno(), []

    def open_another() -> None:
        opened.append(open_socket(socket.AF_INET, socket.SOCK_STREAM, 0))

    other = threading.Thread(target=open_another)

    def search() -> list[tuple[int, int]]:
        if ended and not other.ident:
            found = [(number, os.fstat(number).st_ino)]
            libraries.close()
            other.start()
            other.join(0.2)  # it may have to wait for the end of the search
            return found
        return []

    ended: list[bool] = []
    with claim_opened(search):
        ended.append(True)
    other.join(DEADLINE)
    with opened[0] as ours, socket.create_server(("127.0.0.1", 0)) as listener:
        assert ours.fileno() == number
        ours.connect(listener.getsockname())
        assert in_child(lambda: is_open(ours)) is False


def test_every_use_of_an_object_of_the_parent_raises():
    of_parent: Any = OfParent("this thing", 12)
    with pytest.raises(ForkError, match="this thing belongs to process 12; this is process"):
        of_parent.anything()
    with pytest.raises(ForkError):
        of_parent.anything = 1


@pytest.mark.parametrize("before", ["default", "ignored", "handler"])
def test_a_handler_that_calls_ours_has_in_a_child_what_was_there_before(before):
    """As where a script chains its own handler to that which it finds."""
    called: list[str] = []
    wishes: list[str] = []
    first = {
        "default": signal.SIG_DFL,
        "ignored": signal.SIG_IGN,
        "handler": lambda _number, _frame: called.append("before"),
    }[before]
    old = signal.signal(signal.SIGTERM, first)
    try:
        TerminationFlag(wishes.append)
        ours: Any = signal.getsignal(signal.SIGTERM)

        def chained(number: int, frame: object) -> None:
            ours(number, frame)

        signal.signal(signal.SIGTERM, chained)
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(10 * len(wishes) + len(called))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == {"default": -signal.SIGTERM, "ignored": 0, "handler": 1}[before]
    finally:
        signal.signal(signal.SIGTERM, old)
