"""Faults on targets elsewhere: templates become commands, and `keepstep inject` hits the process at an address."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep_chaos.injecting.elsewhere import command, parse
from keepstep_chaos.injecting.injection import InjectionError, Permissions, inject_at
from keepstep_chaos.injecting.remote_command import CommandError, run_command
from keepstep_chaos.observing.process_table import Program
from keepstep_chaos.vocabulary import KINDS, Fault, Role, Target
from tests.support.services.command import process as started

ROOT = Path(__file__).parents[3]

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
    assert process.wait(60) == -9
    with pytest.raises(InjectionError, match="no process of this user listens at"):
        await inject_at(f"localhost:{port}", "kill", 0.0, Permissions())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("trying\nno such pod", "no such pod"),
        ("Error: cut: needs root\nsrun: error: n1: task 0: Exited with exit code 1", "cut: needs root"),
        ("", "no message"),
    ],
)
async def test_the_error_of_keepstep_inject_or_else_the_last_line_is_the_reason(said, reason):
    with pytest.raises(CommandError, match=f"^sh exited with 3: {reason}$"):
        await run_command(["sh", "-c", f"echo {shlex.quote(said)} >&2; exit 3"], Fault(1, KINDS["cut"], POD, 0.1))


async def test_only_a_fault_that_kills_its_target_may_end_the_command_by_sigkill():
    words = ["sh", "-c", "kill -KILL $$"]
    await run_command(words, Fault(1, KINDS["kill"], POD, 0.0))
    with pytest.raises(CommandError, match=r"^sh exited with -9"):
        await run_command(words, Fault(2, KINDS["cut"], POD, 0.1))


async def test_an_interrupted_command_and_those_that_it_started_end_at_sigint(tmp_path):
    """As `srun`, which passes SIGINT on, but has its step killed at SIGTERM."""
    ready, told = tmp_path / "ready", tmp_path / "told"
    program = (
        "import pathlib, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {2, 15})\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "pathlib.Path(sys.argv[2]).write_text(signal.Signals(signal.sigwait({2, 15})).name)\n"
    )
    words = shlex.join([sys.executable, "-c", program, str(ready), str(told)])
    running = asyncio.create_task(run_command(["sh", "-c", f"{words}; true"], Fault(1, KINDS["freeze"], POD, 60.0)))
    async with asyncio.timeout(60):
        while not ready.exists():  # noqa: ASYNC110 - it tells nothing else
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
    assert told.read_text() == "SIGINT"


async def test_a_fault_is_undone_if_the_terminal_of_keepstep_inject_closes(listening):
    process, port = listening

    def stopped() -> bool:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    async with started("inject", "freeze", "--at", f"localhost:{port}", "--seconds", "60") as inject:
        async with asyncio.timeout(60):
            while not stopped():  # noqa: ASYNC110 - the kernel tells only its parent
                await asyncio.sleep(0.01)
            inject.send_signal(signal.SIGHUP)
            await inject.wait()
        assert not stopped()


def test_paths_of_a_command_line_begin_at_its_folder():
    program = Program(("keepstep", "relay", "--data-dir", "data", "--event-log=/log"), {}, "/srv")
    assert program.path("--data-dir") == Path("/srv/data")
    assert program.path("--event-log") == Path("/log")
    assert program.path("--name") is None


# ---- the templates of docs/chaos.md


def documented() -> dict[str, list[str]]:
    """The templates of each block of the page, as a shell reads them."""
    text = (ROOT / "docs" / "chaos.md").read_text().partition("## Jobs elsewhere")[2]
    blocks = text.partition("```\n")[2].partition("```")[0].split("\n\n")
    read = 'keepstep() { while [ $# -gt 0 ]; do [ "$1" = --exec ] && printf "%s\\0" "$2"; shift; done; }; '
    shown = {
        one[2:].partition(":")[0]: subprocess.check_output(["bash", "-c", read + one], text=True) for one in blocks
    }
    return {name: templates.split("\0")[:-1] for name, templates in shown.items()}


def run_by_sh(words: list[str] | None, folder: Path) -> list[str]:
    """The words of the last command of a template, which a program of its name in ``folder`` prints."""
    assert words is not None
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.check_output(words, text=True, env={**os.environ, "PATH": path}).splitlines()


def test_the_documented_templates_give_the_commands_that_the_platforms_want(tmp_path):
    """kubectl: `kubectl exec POD [flags] -- COMMAND [args...]`; what Slurm and docker want was tried with them."""
    for name, script in {
        "kubectl": 'printf "%s\\n" kubectl "$@"',
        "srun": 'printf "%s\\n" srun "$@"',
        "squeue": '[ "$*" = "-h -j 4711_12 -o %A" ] && echo 4724',
        "docker": 'case "$*" in\n"compose ps -q trainer") echo c1 c2 ;;\n"exec c1 hostname -i") echo 10.0.0.30 ;;\n'
        '"exec c2 hostname -i") echo 10.1.0.3 10.0.0.3 ;;\n*) printf "%s\\n" docker "$@" ;;\nesac',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    freeze = ["keepstep", "inject", "freeze", "--seconds", "1.500"]
    shown = documented()
    at = {POD: "10.0.0.3:29540", RELAY: "relay-0.relay:29520"}

    def words(platform: str, target: Target, kind: str = "freeze") -> list[str]:
        template = parse(shown[platform]).of(target, kind)
        assert template is not None
        return command(template, Fault(1, KINDS[kind], target, 1.5), "night", f"http://{at[target]}")

    def inject(target: Target) -> list[str]:
        return [*freeze[:3], "--at", at[target], *freeze[3:]]

    pod = ["kubectl", "-n", "keepstep", "exec"]
    assert words("Kubernetes", POD) == [*pod, "trainer-12", "--", *inject(POD)]
    assert run_by_sh(words("Kubernetes", RELAY), tmp_path) == [*pod, "relay-0", "--", *inject(RELAY)]
    assert words("Kubernetes", POD, "restart") == ["kubectl", "-n", "keepstep", "delete", "pod", "trainer-12"]
    assert run_by_sh(words("Slurm", POD), tmp_path) == ["srun", "-X", "--overlap", "--jobid", "4724", *inject(POD)]
    assert words("Slurm", POD, "restart") == ["scontrol", "requeue", "4711_12"]
    assert run_by_sh(words("compose", POD), tmp_path) == ["docker", "exec", "c2", *inject(POD)]
    assert words("compose", RELAY) == ["docker", "compose", "exec", "-T", "relay-0.relay", *inject(RELAY)]
