"""Our own address, as others reach it, and the addresses of others."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

from keepstep_mesh.net.addresses import Lookup, address_towards, address_towards_any, in_url, outward_address, reachable
from tests.support.network.namespaces import why_not
from tests.support.network.unanswered import unanswered_name


@pytest.mark.parametrize("peer", ["127.0.0.1", "http://127.0.0.1:29510", "https://127.0.0.1:1"])
def test_the_address_towards_this_machine_is_its_loopback(peer):
    assert address_towards(peer) == "127.0.0.1"
    assert address_towards("localhost") in {"127.0.0.1", "::1"}


def test_a_peer_that_cannot_be_resolved_is_an_error():
    with pytest.raises(OSError, match=r".+"):
        address_towards("http://nobody.invalid:29510")


def test_a_peer_that_cannot_be_resolved_leaves_it_to_the_others_and_to_the_default_route():
    assert address_towards_any(["http://nobody.invalid:1", "http://127.0.0.1:1"]) == "127.0.0.1"
    assert address_towards_any(["http://nobody.invalid:1"]) == outward_address()


def test_a_name_of_this_machine_that_its_hosts_file_gives_to_loopback_is_no_address_for_others(monkeypatch):
    """Debian writes 127.0.1.1 with the name of the machine into /etc/hosts."""
    resolve = socket.getaddrinfo

    def with_own_name(host, *arguments, **how):
        return resolve("127.0.1.1" if host == "l1" else host, *arguments, **how)

    monkeypatch.setattr(socket, "getaddrinfo", with_own_name)
    assert address_towards("http://l1:29510") == "127.0.0.1"
    assert address_towards_any(["http://l1:29510"]) == outward_address()
    assert address_towards_any(["http://127.0.0.1:29510"]) == "127.0.0.1", "all groups of the job are on this machine"
    assert reachable("http://0.0.0.0:29520", ["http://l1:29510"]) == f"http://{in_url(outward_address())}:29520"
    assert reachable("http://[::]:29520", ["http://127.0.0.1:29510"]) == "http://127.0.0.1:29520"
    assert reachable("http://10.0.0.9:29520", ["http://l1:29510"]) == "http://10.0.0.9:29520"


TOLD = """
from keepstep_mesh.net.addresses import outward_address, reachable
print(outward_address(), reachable("http://0.0.0.0:1", [{peer!r}]))
"""


@pytest.mark.parametrize(
    ("setup", "peer", "told"),
    [
        (
            "ip addr add fd00::7/64 dev v0 nodad; ip route add default dev v0",
            "http://[fd00::9]:1",
            "fd00::7 http://[fd00::7]:1",
        ),
        ("ip addr add 10.9.9.7/24 dev v0", "http://10.9.9.1:1", "10.9.9.7 http://10.9.9.7:1"),
    ],
    ids=["only IPv6", "no default route"],
)
def test_the_own_address_is_found_in_networks_of_other_kinds(setup, peer, told):
    if reason := why_not():
        pytest.skip(reason)
    made = f"ip link set lo up; ip link add v0 type veth peer name v1; ip link set v0 up; ip link set v1 up; {setup}"
    script = f'{made}; "$0" -c "$1"'.replace("ip route add", "ip -6 route add")
    command = ["unshare", "--net", "sh", "-ec", script, sys.executable, TOLD.format(peer=peer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == (told, "")


def test_only_an_ipv6_address_gets_brackets():
    assert [in_url(host) for host in ("::1", "10.0.0.1", "a.example")] == ["[::1]", "10.0.0.1", "a.example"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_is_there_at_once(host):
    assert [one[4][:2] for one in Lookup(host, 80).result(0)] == [(host, 80)]


@pytest.mark.parametrize(("host", "error"), [("nobody.invalid", socket.gaierror), ("a..b", UnicodeError)])
def test_a_host_that_is_none_is_an_error(host, error):
    with pytest.raises(error):
        Lookup(host, 80).result(60)


def test_a_name_that_nobody_answers_for_is_waited_for_as_long_as_was_said():
    with unanswered_name() as name, pytest.raises(TimeoutError, match=rf"the name {name} was not found within 0\.1 s"):
        Lookup(name, 80).result(0.1)


def test_a_wait_for_a_name_can_be_interrupted():
    with unanswered_name() as name:
        lookup = Lookup(name, 80)
        threading.Thread(target=lookup.interrupt).start()
        with pytest.raises(ConnectionAbortedError):
            lookup.result(60)
