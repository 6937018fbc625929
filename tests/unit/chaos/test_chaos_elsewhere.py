"""Faults on targets elsewhere: templates become commands, and `keepstep inject` hits the process at an address."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from keepstep_cli.chaos.elsewhere import command, parse
from keepstep_cli.chaos.injection import InjectionError, Permissions, inject_at, run_command
from keepstep_cli.chaos.vocabulary import KINDS, Fault, Role, Target

POD = Target(Role.GROUP, "r12")
RELAY = Target(Role.RELAY, "relay-0.relay:29520")


def test_a_template_becomes_the_command_of_a_fault():
    fault = Fault(1, KINDS["freeze"], POD, 1.5)
    inject = ["keepstep", "inject", "freeze", "--at", "10.0.0.3:29540", "--seconds", "1.500"]

    def filled(template: str, address: str = "http://10.0.0.3:29540") -> list[str]:
        words = parse([template]).of(POD, "freeze")
        assert words is not None
        return command(words, fault, "night", address)

    assert filled("kubectl exec trainer-{number} -- {command}") == ["kubectl", "exec", "trainer-12", "--", *inject]
    assert filled("ssh {host} 'nice {command}'") == ["ssh", "10.0.0.3", f"nice {shlex.join(inject)}"]
    assert filled("freeze=pause {name} {job} {seconds}") == ["pause", "r12", "night", "1.500"]
    assert "[fd00::3]:29540" in filled("{command}", "http://[fd00::3]:29540")


def test_the_template_for_the_role_and_kind_comes_before_more_general_ones():
    known = parse(["all {command}", "group=group {command}", "kill=kill", "relay.kill=relay kill", "restart=again"])
    assert known.of(POD, "freeze") == ("group", "{command}")
    assert known.of(POD, "kill") == ("kill",)
    assert known.of(RELAY, "kill") == ("relay", "kill")
    assert known.of(RELAY, "gil") == ("all", "{command}")
    assert known.of(RELAY, "restart") == ("again",)
    assert known.of(RELAY, "drain") is None, "no process inside can restart its target"
    assert parse(["kill=x"]).of(POD, "gil") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("docker kill {host}", "{command} is missing"),
        ("kill=docker kill {pod}", "unknown placeholder {pod}; known placeholders: command, name"),
        ("kill=", "expected a command"),
        ("kill='a", "No closing quotation"),
    ],
)
def test_an_invalid_template_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse([text])


@pytest.fixture
def listening() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that listens at a port."""
    program = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


async def test_the_process_at_an_address_is_hit(listening):
    process, port = listening
    with pytest.raises(InjectionError, match=r"192\.0\.2\.1 is not an address of this machine"):
        await inject_at(f"192.0.2.1:{port}", "kill", 0.0, Permissions())
    with pytest.raises(InjectionError, match="it was started without KEEPSTEP_CHAOS"):
        await inject_at(f"localhost:{port}", "gil", 0.1, Permissions())
    await inject_at(f"localhost:{port}", "kill", 0.0, Permissions())
    assert process.wait(10) == -9
    with pytest.raises(InjectionError, match="no process of this user listens at"):
        await inject_at(f"localhost:{port}", "kill", 0.0, Permissions())


async def test_the_last_line_of_a_command_that_fails_is_the_reason():
    fault = Fault(1, KINDS["cut"], POD, 0.1)
    with pytest.raises(InjectionError, match="sh exited with 3: no such pod"):
        await run_command(["sh", "-c", "echo trying >&2; echo no such pod >&2; exit 3"], fault)
    await run_command(["sh", "-c", "kill -KILL $$"], Fault(1, KINDS["kill"], POD, 0.0))  # it ended with its target
